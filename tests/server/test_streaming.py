"""The bytes of a stream: the same whether a chunk is encoded whole or filled into a template."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import dataclass

import aiohttp
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ksana.server.app import create_runner
from ksana.server.json_response import dump_json
from ksana.server.streaming import SSE, JsonStream, TextTemplate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


@given(st.text(), st.text())
def test_a_template_writes_what_encoding_the_whole_chunk_would(text: str, model: str) -> None:
    def chunk(content: str) -> dict[str, object]:
        return {"model": model, "choices": [{"delta": {"content": content}, "logprobs": None}], "usage": None}

    assert TextTemplate(SSE, chunk).encode(text) == SSE.encode(chunk(text))


@given(st.text())
def test_an_event_is_one_line_whatever_the_text(text: str) -> None:
    event = SSE.encode({"text": text})
    assert event.count(b"\n") == 2 and event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == {"text": text}


def test_numbers_that_json_lacks_become_null() -> None:
    assert dump_json([math.nan, math.inf, -math.inf, 0.5]) == b"[null,null,null,0.5]"


def test_what_plugins_add_is_encoded_though_the_fast_encoder_refuses_it() -> None:
    value = {"ids": {7}, "big": 2**70, "score": math.nan}
    with pytest.raises(TypeError):
        orjson.dumps(value)
    assert json.loads(dump_json(value)) == {"ids": [7], "big": 2**70, "score": None}


@dataclass
class _Counted:
    """A socket's transport that counts calls of ``write``."""

    transport: object
    writes: int = 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.transport.write(data)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self.transport, name)


async def test_chunks_that_are_ready_together_are_written_together() -> None:
    counted: list[_Counted] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        async with JsonStream(request, SSE) as stream:
            protocol = request.protocol
            counted.append(_Counted(protocol.transport))
            protocol.transport = counted[0]  # type: ignore[assignment]
            await stream.send_encoded(SSE.encode(1) + SSE.encode(2))
            await stream.send_encoded(SSE.encode(3))
        protocol.transport = counted[0].transport  # type: ignore[assignment]
        return stream.response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            response = await session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/")
            assert await response.text() == "data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
    finally:
        await runner.cleanup()
    assert counted[0].writes == 3  # two, and the terminator with the end of the body


async def test_small_packets_are_not_held_back() -> None:
    """Nagle's algorithm would let a token wait for the acknowledgement of the one before."""
    values: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        values.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    finally:
        await runner.cleanup()
    assert values and all(values)
