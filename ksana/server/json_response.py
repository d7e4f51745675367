"""JSON on its way out."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import web
from pydantic_core import to_json


def dump_json(value: object) -> bytes:
    """Encode ``value`` as UTF-8 JSON; NaN and the infinities, which JSON does not have, become null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # what plugins may add to an answer and orjson does not know: sets, models, integers of any size
        return to_json(value, inf_nan_mode="null")


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with ``value`` as the body."""
    return web.Response(body=dump_json(value), status=status, headers=headers, content_type="application/json")
