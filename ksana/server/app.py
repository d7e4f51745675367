"""The application: middlewares, health, and the routes that frontend plugins bring."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Middleware

from ksana.errors import UsageError
from ksana.server.auth import Authentication, authentication_middleware
from ksana.server.cors import CrossOrigin
from ksana.server.health import add_health_routes
from ksana.server.http_log import protocol_logger
from ksana.server.lifecycle import Lifecycle, Phase
from ksana.server.limits import limit_middleware, make_limiters
from ksana.server.middlewares import (
    access_log_middleware,
    drain_middleware,
    echo_request_id,
    error_middleware,
    request_id_middleware,
)
from ksana.server.openapi import add_openapi_route
from ksana.server.security_headers import add_security_headers
from ksana.types.config import KsanaConfig

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine
    from ksana.plugin.manager import KsanaPluginManager

DELIVERY_TIMEOUT_S = 3.0
"""Seconds that answers on their way get to reach their clients when the server closes its connections."""


def create_app(
    engine: AsyncEngine,
    config: KsanaConfig,
    plugin_manager: KsanaPluginManager,
    lifecycle: Lifecycle | None = None,
    authentication: Authentication | None = None,
) -> web.Application:
    """Build the application that serves ``engine``.

    Args:
        lifecycle: the phase that ``/ready`` reports and that decides whether new work is taken; by default ready.
        authentication: decides who may use the server; by default made from ``config``.

    Raises:
        UsageError: two plugins want the same method and path, or the configuration of the server cannot work.
    """
    lifecycle = lifecycle or Lifecycle(Phase.READY)
    authentication = authentication or Authentication(config, plugin_manager)
    cross_origin = CrossOrigin(config.server.cors_origins)
    middlewares: list[Middleware] = [request_id_middleware()]
    if config.server.access_log:
        middlewares.append(access_log_middleware())
    if cross_origin:
        middlewares.append(cross_origin.preflight_middleware())
    middlewares.append(error_middleware())
    if authentication.required:
        middlewares.append(authentication_middleware(authentication))
    middlewares.append(drain_middleware(lifecycle))
    if limiters := make_limiters(config, plugin_manager):
        middlewares.append(limit_middleware(limiters))
    plugin_manager.hook.ksana_middlewares(register=middlewares.append, config=config)

    app = web.Application(middlewares=middlewares, client_max_size=config.server.max_body_bytes)
    app.on_response_prepare.extend((echo_request_id, add_security_headers))
    if cross_origin:
        app.on_response_prepare.append(cross_origin.add_headers)
    add_health_routes(app, engine, lifecycle)
    add_openapi_route(app, needs_key=authentication.required)
    _add_plugin_routes(app, engine, config, plugin_manager)
    return app


def create_runner(app: web.Application) -> web.AppRunner:
    """The runner that serves ``app`` as it must be served: a client that leaves cancels its handler."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=DELIVERY_TIMEOUT_S,
        logger=protocol_logger(),
    )


def _add_plugin_routes(
    app: web.Application, engine: AsyncEngine, config: KsanaConfig, plugin_manager: KsanaPluginManager
) -> None:
    try:
        plugin_manager.hook.ksana_register_routes(app=app, engine=engine, config=config)
    except RuntimeError as error:
        # aiohttp notices a repeated route only if nothing was added in between; then it is the last one.
        if "will never be executed" not in str(error):
            raise
        path = list(app.router.resources())[-1].canonical
        raise UsageError(_conflict_message(path, str(error))) from error
    _refuse_shadowed_routes(app)


def _refuse_shadowed_routes(app: web.Application) -> None:
    owners: dict[tuple[str, str], str] = {}
    for route in app.router.routes():
        if route.resource is None:
            continue
        path = route.resource.canonical
        owner = _module_of(route.handler)
        key = (route.method, re.sub(r"\{[^}]*\}", "{}", path))
        if key in owners:
            raise UsageError(_conflict_message(f"{route.method} {path}", f"{owners[key]} and {owner} both add it"))
        owners[key] = owner


def _module_of(handler: object) -> str:
    function = handler.func if isinstance(handler, functools.partial) else handler
    return str(getattr(function, "__module__", "?"))


def _conflict_message(route: str, details: str) -> str:
    return f"two plugins want the same route {route} ({details}); keep one of them out with -p no:NAME"
