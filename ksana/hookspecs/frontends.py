"""Hooks through which protocols join the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Middleware

    from ksana.engine.async_engine import AsyncEngine
    from ksana.server.limits import RequestLimiter
    from ksana.types.config import KsanaConfig
    from ksana.types.identity import Identity


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


@hookspec(firstresult=True)
def ksana_authenticate(request: web.Request, config: KsanaConfig) -> Identity | Awaitable[Identity | None] | None:
    """Say who sent ``request``, or return None if you do not know its credentials.

    When: once per request, on the event loop, before its body is read. Firstresult. May be ``async def``, with a
    deadline of its own. After all plugins the server's own API keys are tried; whom nobody knows is refused with 401,
    also if there are no keys: a plugin with this hook closes the server. Public routes are answered without it. Raise
    :class:`ksana.errors.RequestError` (401, 403) to refuse the request yourself.

    Example::

        @hookimpl
        async def ksana_authenticate(request, config):
            user = await my_directory.find(request.headers.get("Authorization", ""))
            return Identity(user.name) if user else None
    """


@hookspec
def ksana_create_rate_limiter(config: KsanaConfig) -> RequestLimiter | None:
    """Make an object that says of every request whether it may begin, or return None.

    When: once at start. Not firstresult: a request must pass the limiters of all plugins. The limiter's ``acquire`` and
    ``release`` are called once per request that asks for work (GET, HEAD and OPTIONS do not), on the event loop, after
    authentication and before the body is read; ``acquire`` raises :class:`ksana.errors.RequestError` to refuse.

    Example::

        @hookimpl
        def ksana_create_rate_limiter(config):
            return my_package.LimiterByIdentity(per_minute=60)
    """
