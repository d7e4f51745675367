"""Health, readiness and draining."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import time

import pytest

from ksana.errors import UsageError
from ksana.server import run
from ksana.server.lifecycle import Lifecycle, Phase
from ksana.server.listening import bind_socket, prepare_to_listen, url_of
from ksana.testing.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


async def test_health_follows_the_engine_and_ready_the_phase(serving, engine: ScriptedEngine) -> None:
    lifecycle = Lifecycle(Phase.READY)

    async def statuses() -> list[tuple[int, str]]:
        answers = []
        for path in ("/health", "/ready"):
            async with session.get(path) as response:
                answers.append((response.status, (await response.json())["status"]))
        return answers

    async with serving(engine, lifecycle=lifecycle) as session:
        assert await statuses() == [(200, "healthy"), (200, "ready")]
        lifecycle.advance(Phase.DRAINING)
        assert await statuses() == [(200, "healthy"), (503, "draining")]
        engine.is_alive = False
        assert (await statuses())[0] == (503, "unhealthy")


async def test_draining_refuses_new_work_and_lets_the_running_end(serving, engine: ScriptedEngine) -> None:
    lifecycle = Lifecycle(Phase.READY)
    engine.held = True
    body = {"prompt": "hi", "stream": False}
    async with serving(engine, lifecycle=lifecycle) as session:
        running = asyncio.create_task(session.post("/generate", json=body))
        while not engine.num_unfinished():
            await asyncio.sleep(0.005)
        lifecycle.advance(Phase.DRAINING)
        async with session.post("/generate", json=body) as refused:
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) > 0
            assert (await refused.json())["error"]["code"] == "shutting_down"
        engine.held = False
        async with await running as response:
            assert (await response.json())["texts"] == ["Hello, world!"]


async def test_aborted_requests_tell_their_clients(serving, engine: ScriptedEngine) -> None:
    engine.answer = "x" * 200
    engine.token_interval_s = 0.01
    async with serving(engine) as session:
        running = asyncio.create_task(session.post("/generate", json={"prompt": "hi", "stream": False}))
        while not engine.num_unfinished():
            await asyncio.sleep(0.005)
        await engine.abort_all()
        async with await running as response:
            assert (await response.json())["finish_reasons"] == ["abort"]


async def test_an_engine_that_stops_late_because_nothing_could_run_has_stopped(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin's native code held the interpreter's lock until long after the deadline."""
    monkeypatch.setattr(run, "_exit_now", lambda code: pytest.fail("given up"))

    def stop() -> None:
        ctypes.PyDLL(None).usleep(500_000)
        time.sleep(0.02)

    monkeypatch.setattr(engine, "stop", lambda reason: asyncio.to_thread(stop))
    await run._stop_engine(engine, "told to stop", timeout_s=0.2, exit_code=1)


def test_phases_never_go_back() -> None:
    lifecycle = Lifecycle()
    lifecycle.advance(Phase.DRAINING)
    lifecycle.advance(Phase.READY)
    assert lifecycle.phase is Phase.DRAINING


def test_a_second_server_fails_before_the_first_one_listens() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            bind_socket("127.0.0.1", port)
        prepare_to_listen(first)
        first.listen()
        with pytest.raises(UsageError, match=f"port {port}"):
            bind_socket("127.0.0.1", port)


def test_the_port_is_free_again_while_old_connections_linger() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        prepare_to_listen(first)
        first.listen()
        with socket.create_connection(("127.0.0.1", port)):
            # The side that closes first is the one that lingers.
            first.accept()[0].close()
    bind_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=host):
        bind_socket(host, 0)


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1"), ("", "127.0.0.1")])
def test_the_shown_url_is_one_that_a_client_can_use(host: str, shown: str) -> None:
    with bind_socket(host, 0) as bound:
        assert url_of(bound) == f"http://{shown}:{bound.getsockname()[1]}"
