"""A server on a real port in a thread of the test, for clients that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import web

from ksana.plugin.manager import KsanaPluginManager
from ksana.server.app import create_app, create_runner
from ksana.server.lifecycle import Lifecycle
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine


@contextmanager
def live_server(
    engine: AsyncEngine | Any,
    *plugins: object,
    config: KsanaConfig | None = None,
    lifecycle: Lifecycle | None = None,
) -> Iterator[str]:
    """Serve ``engine`` with the routes of ``plugins`` and yield the base URL."""
    manager = engine.plugin_manager if isinstance(engine, ScriptedEngine) else KsanaPluginManager()
    for plugin in plugins:
        manager.register(plugin)
    app = create_app(engine, config or KsanaConfig(), manager, lifecycle)
    loop = uvloop.new_event_loop()  # as ksana-serve has
    thread = threading.Thread(target=loop.run_forever, name="live-server", daemon=True)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(_start(app), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(app: web.Application) -> tuple[web.AppRunner, int]:
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]
