"""Web pages of other origins: none may use the server unless its operator names it.

Credentials of the browser (cookies, client certificates) are never allowed, so that ``*`` gives a page no more than
what it knows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ksana.types.config import ANY_ORIGIN

_EXPOSED_HEADERS = "X-Request-Id, Retry-After"
_METHODS = "GET, POST, DELETE"
_MAX_AGE_S = "600"


class CrossOrigin:
    """What the server tells browsers about pages of other origins.

    Args:
        origins: as browsers write them, or ``*``.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        """True if pages of ``origin`` may use the server."""
        return ANY_ORIGIN in self._origins or origin in self._origins

    def preflight_middleware(self) -> Middleware:
        """Answer the question that browsers ask first. It carries no key, so this comes before authentication."""

        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not is_preflight or not self.allows(request.headers.get("Origin", "")):
                return await handler(request)
            headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
            if wanted := request.headers.get("Access-Control-Request-Headers"):
                headers["Access-Control-Allow-Headers"] = wanted
            return web.Response(status=204, headers=headers)

        return answer_preflight

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for ``on_response_prepare``: errors and streams get the headers too."""
        if ANY_ORIGIN not in self._origins:
            response.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin is not None and self.allows(origin):
            response.headers["Access-Control-Allow-Origin"] = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS
