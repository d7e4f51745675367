"""``/engine/stats`` and its stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web

from ksana.builtins import page
from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.manager import KsanaPluginManager
from ksana.server import engine_stats
from ksana.server.app import create_app, create_runner
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig
from ksana.types.stats import EngineSnapshot, StepStats

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stats, "INTERVAL_S", 0.01)


@asynccontextmanager
async def serving(engine: AsyncEngine | ScriptedEngine) -> AsyncIterator[tuple[aiohttp.ClientSession, web.AppRunner]]:
    manager = KsanaPluginManager()
    manager.register(page)
    runner = create_runner(create_app(engine, KsanaConfig(), manager))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session, runner
    finally:
        await runner.cleanup()


class SteppingEngine(ScriptedEngine):
    """Makes a step between every two looks, and remembers the last two."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(2)

    def snapshot(self) -> EngineSnapshot:
        number = next(self._numbers)
        return EngineSnapshot(num_steps=number, recent_steps=[StepStats(number - 1), StepStats(number)])


async def test_a_stream_tells_every_step_once() -> None:
    numbers: list[int] = []
    async with serving(SteppingEngine()) as (session, _), session.get("/engine/stats/stream") as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                numbers += [step["number"] for step in orjson.loads(line[6:])["recent_steps"]]
            if len(numbers) >= 5:
                break
    assert numbers == [1, 2, 3, 4, 5]


async def test_watchers_are_counted_and_leave_their_place(engine: ScriptedEngine) -> None:
    async with serving(engine) as (session, _):
        watching = [await session.get("/engine/stats/stream") for _ in range(engine_stats.MAX_WATCHERS)]
        async with session.get("/engine/stats/stream") as refused:
            assert refused.status == 429
            assert (await refused.json())["error"]["code"] == "too_many_watchers"
        watching.pop().close()
        while (again := await session.get("/engine/stats/stream")).status == 429:
            await asyncio.sleep(0.01)
        assert again.status == 200
        for response in (again, *watching):
            response.close()


async def test_the_server_can_stop_while_somebody_watches(engine: ScriptedEngine) -> None:
    async with serving(engine) as (session, runner), session.get("/engine/stats/stream") as response:
        await response.content.readline()
        stopping = asyncio.create_task(runner.cleanup())
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await stopping


async def test_watchers_of_a_dead_engine_are_told(engine: ScriptedEngine) -> None:
    async with serving(engine) as (session, _), session.get("/engine/stats/stream") as response:
        await response.content.readline()
        engine.is_alive = False
        assert b"engine_dead" in await response.content.read()
        async with session.get("/engine/stats") as refused:
            assert refused.status == 503
