"""Hooks through which protocols join the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Middleware

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import KsanaConfig


@hookspec
def ksana_register_routes(app: web.Application, engine: AsyncEngine, config: KsanaConfig) -> None:
    """Add your routes to the server's application.

    When: once at start, after the engine exists and before the port is opened. Not firstresult. Two plugins that want
    the same route and method are an error that names it. Handlers may raise :class:`ksana.errors.RequestError`.

    Example::

        @hookimpl
        def ksana_register_routes(app, engine, config):
            app.router.add_get("/hello", my_handler)
    """


@hookspec
def ksana_middlewares(register: Callable[[Middleware], None], config: KsanaConfig) -> None:
    """Register aiohttp middlewares; they run inside the server's own (request id, access log, errors).

    When: once at start, before routes are added. Not firstresult. aiohttp passes the next handler by keyword: name
    the parameter ``handler``.

    Example::

        @hookimpl
        def ksana_middlewares(register, config):
            register(my_middleware)
    """
