"""Answers that are sent piece by piece, and what happens to them when something goes wrong half-way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.errors import as_request_error, error_body
from ksana.server.json_response import dump_json
from ksana.server.middlewares import REQUEST_ID, client_has_left

WRITE_TIMEOUT_S = 60.0
"""Seconds that a client may leave its full receive buffer unread before it is taken for dead."""

_PIECE_BYTES = 2**20
"""Of a large answer, what is written at a time, each with the same deadline."""

_NEVER_WAITS_BYTES = 2**15
"""A write that leaves no more than this in the transport's buffer returns at once: asyncio's limit is twice as high."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How JSON chunks become a body.

    Attributes:
        content_type: of the response.
        prefix, suffix: bytes around every chunk.
        terminator: bytes that tell a complete answer from one that broke off.
        error_body: makes the last chunk of an answer that fails half-way.
        headers: further headers of the response.
    """

    content_type: str
    prefix: bytes
    suffix: bytes
    terminator: bytes
    error_body: Callable[[RequestError], dict[str, Any]]
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, chunk: object) -> bytes:
        """``chunk`` as it goes over the wire."""
        return self.prefix + dump_json(chunk) + self.suffix


SSE = Framing(
    content_type="text/event-stream; charset=utf-8",
    prefix=b"data: ",
    suffix=b"\n\n",
    terminator=b"data: [DONE]\n\n",
    error_body=error_body,
    # The second header keeps nginx from collecting the stream.
    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
)
"""Server-sent events as the OpenAI API uses them."""


class TextTemplate:
    """A chunk that is sent again and again with another text: all the rest of it is encoded once.

    Args:
        framing: of the stream.
        make: the chunk for a text, in which that text stands in one place; called once, here.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, framing: Framing, make: Callable[[str], object]) -> None:
        placeholder = uuid.uuid4().hex
        self._head, self._tail = framing.encode(make(placeholder)).split(dump_json(placeholder))

    def encode(self, text: str) -> bytes:
        """The same bytes as ``framing.encode(make(text))``."""
        return self._head + dump_json(text) + self._tail


class JsonStream:
    """An answer of many JSON chunks, as an asynchronous context manager.

    Entering sends the headers: from then on the status is 200, come what may. An exception in the block becomes a last
    chunk with the error and no terminator. A client that does not read for ``write_timeout_s`` is cut off, and then
    everything goes as for any client that leaves: the handler is cancelled.

    Example::

        async with JsonStream(request, SSE) as stream:
            await stream.send({"text": "hello"})
        return stream.response
    """

    def __init__(self, request: web.Request, framing: Framing, *, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._request = request
        self._framing = framing
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(headers={**framing.headers, "Content-Type": framing.content_type})

    async def __aenter__(self) -> JsonStream:
        await self.response.prepare(self._request)
        return self

    async def send(self, chunk: object) -> None:
        """Send one chunk; waits while the client's buffers are full."""
        await self.send_encoded(self._framing.encode(chunk))

    async def send_encoded(self, data: bytes) -> None:
        """Send any number of chunks that the framing has encoded, in one write: each costs a call of the system."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        if transport.get_write_buffer_size() + len(data) <= _NEVER_WAITS_BYTES:
            await self.response.write(data)
            return
        with _deadline(transport, self._write_timeout_s):
            await self.response.write(data)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        transport = self._request.transport
        if error is None:
            end = self._framing.terminator
        elif isinstance(error, Exception) and not client_has_left(self._request):
            end = self._framing.encode(self._framing.error_body(as_request_error(error, self._request[REQUEST_ID])))
        else:
            return False
        if transport is None:
            raise ConnectionResetError("the client has left")
        with _deadline(transport, self._write_timeout_s):
            await self.response.write_eof(end)
        return True


async def send_whole(request: web.Request, data: bytes, content_type: str) -> web.StreamResponse:
    """Send a large answer and return when the client has it, or has been cut off because it does not read."""
    headers = {"Content-Type": content_type, "Content-Length": str(len(data))}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        with _deadline(transport, WRITE_TIMEOUT_S):
            await response.write(view[start : start + _PIECE_BYTES])
    await response.write_eof()
    return response


@contextmanager
def _deadline(transport: asyncio.Transport, timeout_s: float) -> Iterator[None]:
    """Cut the client off unless the block ends in time."""
    timer = asyncio.get_running_loop().call_later(timeout_s, transport.abort)
    try:
        yield
    finally:
        timer.cancel()
