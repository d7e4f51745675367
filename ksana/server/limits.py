"""Who must wait: limits on the requests in work, the server's own and those of plugins."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ksana.errors import KsanaCode, RequestError
from ksana.server.auth import identity_of
from ksana.server.middlewares import SAFE_METHODS
from ksana.types.config import KsanaConfig
from ksana.types.identity import Identity

if TYPE_CHECKING:
    from ksana.plugin.manager import KsanaPluginManager


class RequestLimiter(Protocol):
    """Says of every request whether it may begin. Called on the event loop."""

    async def acquire(self, identity: Identity, request: web.Request) -> None:
        """Let the request begin, or raise :class:`RequestError`, 429 as a rule, with ``retry_after_s``.

        The body has not been read yet. Whoever waits here sets a deadline of its own.
        """

    def release(self, identity: Identity, request: web.Request) -> None:
        """The request that was let in has ended, in whatever way."""


class ConcurrencyLimiter:
    """:class:`RequestLimiter` that has at most ``limit`` requests in work, whoever sent them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_running = 0

    async def acquire(self, identity: Identity, request: web.Request) -> None:
        if self._num_running >= self._limit:
            raise RequestError(
                f"the server works on {self._limit} requests already, as many as it may; try again later",
                status=429,
                type="rate_limit_error",
                code="too_many_requests",
                ksana_code=KsanaCode.QUEUE_FULL,
            )
        self._num_running += 1

    def release(self, identity: Identity, request: web.Request) -> None:
        self._num_running -= 1


def make_limiters(config: KsanaConfig, plugin_manager: KsanaPluginManager) -> list[RequestLimiter]:
    """The limiters that every request passes, the server's own first."""
    limit = config.server.max_concurrent_requests
    own: list[RequestLimiter] = [ConcurrencyLimiter(limit)] if limit else []
    return [*own, *plugin_manager.hook.ksana_create_rate_limiter(config=config)]


def limit_middleware(limiters: list[RequestLimiter]) -> Middleware:
    """Pass requests that ask for work through all of ``limiters``; those that only look are never refused."""

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in SAFE_METHODS:
            return await handler(request)
        identity = identity_of(request)
        with ExitStack() as let_in:
            for limiter in limiters:
                await limiter.acquire(identity, request)
                let_in.callback(limiter.release, identity, request)
            return await handler(request)

    return limit
