"""JSON and MessagePack bodies: what the one may hold, the other may, and an answer comes as its request came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson
from aiohttp import web

from ksana.errors import RequestError
from ksana.server.json_body import Model, is_json, parse_json, read_body, validate_body

_MAX_CONTAINERS = 2**18
"""Lists and maps in a MessagePack body. An empty one takes a byte there, and sixty in memory."""


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How objects become bytes.

    Attributes:
        content_type: of bodies of this format.
        empty: what to say of a body without a byte.
        load: the object in a body; raises RequestError.
        dump: the body for an object; ``bytes`` in it hold ASCII, and JSON has them as strings.
    """

    content_type: str
    empty: str
    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]


async def read_formatted(request: web.Request, model: type[Model]) -> tuple[Model, BodyFormat]:
    """Read, parse and validate the body of ``request``; the format is the one to answer in.

    Raises:
        RequestError: as :func:`ksana.server.json_body.read_json` does.
    """
    format = _format_of(request)
    data = await read_body(request)
    if not data:
        raise RequestError(format.empty, code="invalid_body")
    return validate_body(format.load(data), model), format


def _format_of(request: web.Request) -> BodyFormat:
    """What the content type names, whatever its parameters; MessagePack if there is none."""
    content_type = request.content_type if "Content-Type" in request.headers else MSGPACK.content_type
    if content_type in _MSGPACK_TYPES:
        return MSGPACK
    if is_json(content_type):
        return JSON
    raise RequestError(
        f"The content type {content_type} is not supported: send {MSGPACK.content_type} or {JSON.content_type}",
        status=415,
        code="unsupported_media_type",
    )


def _load_msgpack(data: bytes) -> Any:
    """Damaged data, text that is not UTF-8, keys that are no text, and bombs are refused."""
    count = 0

    def counted(container: Any) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} lists and maps")
        return container

    try:
        return msgpack.unpackb(data, list_hook=counted, object_hook=counted, ext_hook=_refuse_ext)
    except ValueError as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"Failed to unpack the request bytes: {reason}", code="invalid_msgpack") from None


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"an extension of type {code}")


def _dump_msgpack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _dump_json(value: Any) -> bytes:
    return orjson.dumps(value, default=bytes.decode)


JSON = BodyFormat("application/json", "Json Request content is empty.", parse_json, _dump_json)
MSGPACK = BodyFormat("application/x-msgpack", "Request content is empty.", _load_msgpack, _dump_msgpack)

_MSGPACK_TYPES = frozenset({MSGPACK.content_type, "application/msgpack", "application/vnd.msgpack"})
