"""The errors of the native API: the usual shape, with the numeric status of the original engine beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from ksana.server.errors import as_request_error, error_response, native_error_body
from ksana.server.middlewares import REQUEST_ID


async def with_native_errors(request: web.Request, answering: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """Await the answer to ``request``; what it raises becomes one that says so."""
    try:
        return await answering
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        described = as_request_error(error, request[REQUEST_ID])
        return error_response(described, body=native_error_body(described))
