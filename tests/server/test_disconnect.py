"""A client may leave, or stop reading, at any moment: nothing of it stays in the engine (vllm#10806, sglang#36876)."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ksana.server.app import create_runner
from ksana.server.generation import Generation
from ksana.server.middlewares import error_middleware, request_id_middleware
from ksana.server.streaming import SSE, JsonStream
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.request import RequestDraft

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what must come soon; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.005)


async def leave(session: aiohttp.ClientSession, body: dict[str, Any], *, when: Callable[[], bool]) -> None:
    """Send a request and close its connection as soon as ``when`` holds."""
    url = session._base_url
    assert url is not None
    _, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await eventually(when)
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_queued(
    serving, engine: ScriptedEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ksana.access")
    engine.held = True
    async with serving(engine) as session:
        await leave(session, {"prompt": "hi", "stream": stream}, when=lambda: engine.num_unfinished() == 1)
        await eventually(lambda: engine.aborted == ["r0"])
        await eventually(lambda: any("POST /generate 499 " in record.getMessage() for record in caplog.records))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_tokens_come(
    serving, engine: ScriptedEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine.answer = "x" * 200
    engine.token_interval_s = 0.01
    async with serving(engine) as session:
        started = lambda: any(len(s._output.token_ids) > 2 for s in engine.running.values())  # noqa: E731
        await leave(session, {"prompt": "hi", "stream": stream}, when=started)
        await eventually(lambda: engine.aborted == ["r0"])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_leaving_while_sending_the_body(
    serving, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as session:
        url = session._base_url
        assert url is not None
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        async with session.post("/generate", json={"prompt": "hi", "stream": False}) as response:
            assert response.status == 200
    assert len(engine.drafts) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_stops_reading_is_cut_off(engine: ScriptedEngine) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        async with (
            Generation(engine, [RequestDraft(prompt="hi")]),
            JsonStream(request, SSE, write_timeout_s=0.2) as out,
        ):
            while True:
                await out.send("x" * 100_000)

    app = web.Application(middlewares=[request_id_middleware(), error_middleware()])
    app.router.add_get("/endless", endless)
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.create_connection(runner.addresses[0]) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: engine.aborted == ["r0"])
    await runner.cleanup()
