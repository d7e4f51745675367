"""The page at ``/`` as a plugin, on by default: a chat with the model, and what the engine does meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from aiohttp import web

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import KsanaConfig


@hookimpl
def ksana_register_routes(app: web.Application, engine: AsyncEngine, config: KsanaConfig) -> None:
    """Add the page's files, and the engine's figures that it shows."""
    # Here and not above: a process without a server does not pay for one.
    from ksana.server.engine_stats import EngineStats
    from ksana.server.page_routes import PageFiles

    files = PageFiles()
    app.router.add_get("/", files.index)
    app.router.add_get("/page/{name}", files.file)
    stats = EngineStats(engine)
    app.router.add_get("/engine/stats", stats.get)
    app.router.add_get("/engine/stats/stream", stats.watch)
    app.on_shutdown.append(stats.close)
