"""JSON on its way out."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from pydantic_core import to_json


def dump_json(value: object) -> bytes:
    """Encode ``value`` as UTF-8 JSON; NaN and the infinities, which JSON does not have, become null."""
    return to_json(value, inf_nan_mode="null")


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with ``value`` as the body."""
    return web.Response(body=dump_json(value), status=status, headers=headers, content_type="application/json")
