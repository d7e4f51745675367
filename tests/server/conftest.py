from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ksana.builtins import native_api
from ksana.plugin.manager import KsanaPluginManager
from ksana.server.app import create_app, create_runner
from ksana.server.lifecycle import Lifecycle
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig, ServerConfig

_numbers = itertools.count()

PluginOf = Callable[..., ModuleType]
Serving = Callable[..., AbstractAsyncContextManager[aiohttp.ClientSession]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def plugin_of() -> PluginOf:
    """``plugin_of(hook, ...)``: a plugin of these functions."""

    def make(*hooks: Callable[..., object]) -> ModuleType:
        plugin = ModuleType(f"plugin_{next(_numbers)}")
        vars(plugin).update({hook.__name__: hook for hook in hooks})
        return plugin

    return make


@pytest.fixture
def serving() -> Serving:
    """``async with serving(engine, *plugins, **server_options) as session``: a client of a running server."""
    return _serving


@asynccontextmanager
async def _serving(
    engine: ScriptedEngine, *plugins: object, lifecycle: Lifecycle | None = None, **server_options: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    manager = KsanaPluginManager()
    for plugin in (native_api, *plugins):
        manager.register(plugin)
    app = create_app(engine, KsanaConfig(server=ServerConfig(**server_options)), manager, lifecycle)
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session
    finally:
        await runner.cleanup()
