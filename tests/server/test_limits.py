"""The limit on requests at once, and limiters of plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from ksana import hookimpl
from ksana.errors import RequestError
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.identity import Identity

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

GENERATE = {"prompt": "hi", "stream": False}


class Recorder:
    """Counts, and refuses when told to."""

    def __init__(self) -> None:
        self.refuses = False
        self.events: list[str] = []

    async def acquire(self, identity: Identity, request: web.Request) -> None:
        await asyncio.sleep(0)
        if self.refuses:
            raise RequestError("slower", status=429, code="slower", retry_after_s=17)
        self.events.append(f"acquire {identity.name} {request.path}")

    def release(self, identity: Identity, request: web.Request) -> None:
        self.events.append(f"release {identity.name} {request.path}")


def hook_for(limiter: Recorder | None) -> Callable[[], Recorder | None]:
    @hookimpl
    def ksana_create_rate_limiter() -> Recorder | None:
        return limiter

    return ksana_create_rate_limiter


async def test_one_too_many_is_refused_and_a_place_is_free_again(serving, engine: ScriptedEngine) -> None:
    engine.held = True
    async with serving(engine, max_concurrent_requests=2) as session:

        async def generate() -> int:
            async with session.post("/generate", json=GENERATE) as response:
                return response.status

        running = [asyncio.create_task(generate()) for _ in range(2)]
        while engine.num_unfinished() < 2:
            await asyncio.sleep(0.005)
        async with session.post("/generate", json=GENERATE) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "too_many_requests")
            assert int(refused.headers["Retry-After"]) > 0
        async with session.get("/health") as health:
            assert health.status == 200
        running[0].cancel()
        while engine.num_unfinished() > 1:
            await asyncio.sleep(0.005)
        engine.held = False
        assert (await generate(), await running[1], await generate()) == (200, 200, 200)


async def test_a_request_passes_all_limiters_and_gives_back_what_it_took(
    serving, engine: ScriptedEngine, plugin_of
) -> None:
    first, second = Recorder(), Recorder()
    plugins = [plugin_of(hook_for(limiter)) for limiter in (first, None, second)]
    headers = {"X-Api-Key": "key"}
    async with serving(engine, *plugins, api_keys=("key",)) as session:
        for body in (GENERATE, {"prompt": 1}):
            async with session.post("/generate", json=body, headers=headers):
                pass
        async with session.get("/health", headers=headers):
            pass
        assert first.events == second.events == ["acquire api-key-1 /generate", "release api-key-1 /generate"] * 2
        first.refuses = True  # it is asked last
        async with session.post("/generate", json=GENERATE, headers=headers) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "17")
        async with session.post("/generate", json=GENERATE) as stranger:
            assert stranger.status == 401
    assert second.events == ["acquire api-key-1 /generate", "release api-key-1 /generate"] * 3
    assert len(first.events) == 4
