"""Whatever a server does, a benchmark ends, and says what happened."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

pytestmark = pytest.mark.timeout(60)

CHUNK = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}\n\n'


async def stream(request: web.Request, *pieces: bytes, gap_s: float = 0.0) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(gap_s)
    return response


async def fine(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, LAST)


async def failing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def dripping(request: web.Request) -> web.StreamResponse:
    return await stream(request, *[CHUNK] * 100, gap_s=0.1)


async def half(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, CHUNK)


async def cut(request: web.Request) -> web.StreamResponse:
    response = await stream(request, CHUNK)
    assert request.transport is not None
    request.transport.abort()
    return response


async def babbling(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, b"data: {nonsense\n\n")


async def strange(request: web.Request) -> web.StreamResponse:
    return await stream(request, b'data: {"choices": {"text": 1}}\n\n')


async def a_list(request: web.Request) -> web.StreamResponse:
    return await stream(request, b"data: [1, 2]\n\n")


async def page(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>It works</html>")


async def giving_up(request: web.Request) -> web.StreamResponse:
    return await stream(request, CHUNK, b'data: {"error": {"message": "the engine died"}}\n\n')


@pytest.mark.parametrize(
    ("handler", "kind", "detail"),
    [
        (failing, "HTTP 500", "out of memory"),
        (silent, "stalled", "--stall-timeout"),
        (dripping, "timeout", "--client-timeout"),
        (half, "incomplete answer", "ended before"),
        (cut, "connection lost", ""),
        (babbling, "malformed answer", "nonsense"),
        (strange, "malformed answer", "unexpected JSON"),
        (a_list, "malformed answer", "unexpected JSON"),
        (page, "malformed answer", "It works"),
        (giving_up, "error in the answer", "the engine died"),
    ],
)
def test_failures_are_told_apart(
    bench: Any, odd: Callable[..., Any], handler: Callable[..., Awaitable[Any]], kind: str, detail: str
) -> None:
    with odd(handler) as url:
        code = bench(url, "--num-requests", 3, "--stall-timeout", 0.5, "--client-timeout", 1.0)
    assert code == 1
    errors = bench.run["errors"]
    assert list(errors) == [kind]
    assert errors[kind]["count"] == 3
    assert detail in errors[kind]["example"]
    assert f"3 failed: {kind}" in bench.stdout
    assert "Traceback" not in bench.stderr


def test_a_few_failures_leave_the_figures_of_the_rest(bench: Any, odd: Callable[..., Any]) -> None:
    count = iter(range(100))

    async def moody(request: web.Request) -> web.StreamResponse:
        return await failing(request) if next(count) % 2 else await fine(request)

    with odd(moody) as url:
        assert bench(url, "--num-requests", 10) == 1
    run = bench.run
    assert (run["requests"]["completed"], run["requests"]["failed"]) == (5, 5)
    # No usage and no ids: what is counted are pieces, and the report says so.
    assert run["tokens"]["counted_by"] == {"chunks": 5}
    assert run["tokens"]["output"] == 10
    assert run["tokens"]["input"] == 5 * 128
    assert "tells no counts" in bench.stdout


def test_nobody_listens(bench: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert bench(url) == 2
    assert bench.stderr.startswith("ksana-bench: error: no server to measure at " + url)
    assert "connection refused" in bench.stderr and bench.stderr.count("\n") == 1
    assert bench("http://no-such-host.invalid:1") == 2
    assert "unknown host" in bench.stderr or "cannot connect" in bench.stderr


def test_one_of_several_servers_is_gone(bench: Any, odd: Callable[..., Any]) -> None:
    with odd(fine) as url:
        assert bench(f"{url},http://127.0.0.1:1", "--num-requests", 4) == 1
    assert {kind: it["count"] for kind, it in bench.run["errors"].items()} == {"connection refused": 2}
    assert bench.run["requests"]["completed"] == 2


@pytest.mark.parametrize(
    ("status", "flags", "code", "message"),
    [
        (401, [], 2, "pass --api-key"),
        (503, [], 2, "answered 503; name the API and the model"),
        (503, ["--api", "completions"], 2, "answered 503; name the API and the model"),
        (503, ["--api", "completions", "--model", "odd"], 0, ""),
    ],
)
def test_servers_that_do_not_list_their_models(
    bench: Any, odd: Callable[..., Any], status: int, flags: list[str], code: int, message: str
) -> None:
    with odd(fine, status=status) as url:
        assert bench(url, "--num-requests", 1, *flags) == code
    assert message in bench.stderr


def test_a_long_reason_is_shown_whole_where_there_is_no_terminal(odd: Callable[..., Any], bench: Any) -> None:
    reason = "the " + "very " * 40 + "last word"

    async def refusing(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": reason}}, status=400)

    with odd(refusing) as url:
        assert bench(url, "--num-requests", 1) == 1
    assert f"1 failed: HTTP 400: {reason}\n" in bench.stdout
    assert not any(line.endswith(" ") for line in bench.stdout.splitlines() if "failed:" in line)
