"""What browsers are told about every answer, so that none of them can be turned against a user."""

from __future__ import annotations

from aiohttp import web

_CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


async def add_security_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for ``on_response_prepare``. A page that knows better sets the headers itself."""
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    if response.content_type == "text/html":
        response.headers.setdefault("Content-Security-Policy", _CONTENT_POLICY)
        response.headers.setdefault("Referrer-Policy", "no-referrer")
        response.headers.setdefault("X-Frame-Options", "DENY")
