"""The native API as a plugin, on by default: ``/generate``, ``/forward`` and ``/reset_prefix_cache``, all by POST."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from aiohttp import web

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import KsanaConfig


@hookimpl
def ksana_register_routes(app: web.Application, engine: AsyncEngine, config: KsanaConfig) -> None:
    """Add the routes."""
    # Here and not above: a process without a server does not pay for one.
    from ksana.server.forward import ForwardHandler
    from ksana.server.generate import GenerateHandler
    from ksana.server.prefix_cache import PrefixCacheHandler

    app.router.add_post("/generate", GenerateHandler(engine).handle)
    app.router.add_post("/forward", ForwardHandler(engine).handle)
    app.router.add_post("/reset_prefix_cache", PrefixCacheHandler(engine).reset)
