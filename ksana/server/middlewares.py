"""What surrounds every handler: request id, access log, errors, and the refusal of new work while draining."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ksana.errors import KsanaCode, RequestError
from ksana.server.errors import as_request_error, error_response
from ksana.server.lifecycle import Lifecycle
from ksana.types.trace_context import current_trace_context, valid_traceparent

access_logger = logging.getLogger("ksana.access")

REQUEST_ID_HEADER = "X-Request-Id"
TRACEPARENT_HEADER = "traceparent"
REQUEST_ID: web.RequestKey[str] = web.RequestKey("ksana_request_id", str)
"""The request's id, to be read as ``request[REQUEST_ID]``. Clients may repeat theirs, so it is not unique."""

_SANE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of requests that only look: neither draining nor limits refuse them."""

_CLIENT_LEFT = 499
"""The status that the access log shows for a request whose client left before its end, as nginx does."""


def request_id_middleware() -> Middleware:
    """Give every request an id: the client's own ``X-Request-Id`` if it is sane, otherwise a new one.

    A valid ``traceparent`` becomes the trace context of all that is done for the request.
    """

    @web.middleware
    async def name_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = given if _SANE_REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        current_trace_context.set(valid_traceparent(request.headers.get(TRACEPARENT_HEADER, "")))
        return await handler(request)

    return name_request


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for ``on_response_prepare``: works for streams too, whose headers leave before they end."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id


def access_log_middleware() -> Middleware:
    """Log one line a request. Headers, bodies and query strings stay out of it: they hold keys and prompts."""

    @web.middleware
    async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        start = time.monotonic()
        status, size = _CLIENT_LEFT, 0
        try:
            response = await handler(request)
            status, size = response.status, _body_size(response)
            return response
        finally:
            access_logger.info(
                "%s %s %d %.1fms %d bytes %s%s",
                request.method,
                # Still percent-encoded: a decoded path could forge log lines.
                request.rel_url.raw_path,
                status,
                (time.monotonic() - start) * 1000,
                size,
                request[REQUEST_ID],
                _trace_note(current_trace_context.get()),
            )

    return log_access


def error_middleware() -> Middleware:
    """Turn every exception into an answer of the one error shape."""

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            raise
        except web.HTTPException as error:
            if error.status < 400:
                raise
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return error_response(_describe(error, request), headers=headers)
        except Exception as error:
            if isinstance(error, ConnectionError) and client_has_left(request):
                # Nobody reads this; raised further, it would be logged as an error of ours.
                return web.Response(status=_CLIENT_LEFT)
            return error_response(as_request_error(error, request[REQUEST_ID]))

    return answer_errors


def drain_middleware(lifecycle: Lifecycle) -> Middleware:
    """Refuse new work while the server drains. Looking (health, models) stays allowed."""

    @web.middleware
    async def refuse_while_draining(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in SAFE_METHODS or lifecycle.accepts_work:
            return await handler(request)
        raise RequestError(
            "the server is shutting down; send the request to another one, or try again later",
            status=503,
            type="server_error",
            code="shutting_down",
            ksana_code=KsanaCode.ABORTED,
        )

    return refuse_while_draining


def client_has_left(request: web.Request) -> bool:
    """True once the connection of ``request`` is closed or closing."""
    return request.transport is None or request.transport.is_closing()


def _trace_note(traceparent: str) -> str:
    """The trace's id, by which a log is searched."""
    return f" trace {traceparent.split('-')[1]}" if traceparent else ""


def _describe(error: web.HTTPException, request: web.Request) -> RequestError:
    described = as_request_error(error, request[REQUEST_ID])
    if error.status == 404 and error.text == "404: Not Found":
        described.message = f"no such route: {request.method} {request.rel_url.raw_path}"
    elif error.status == 405:
        described.message = f"{request.rel_url.raw_path} does not take {request.method}"
    return described


def _body_size(response: web.StreamResponse) -> int:
    if isinstance(response, web.Response) and isinstance(response.body, (bytes, bytearray)):
        return len(response.body)
    # A stream has ended by now, and knows what it sent.
    return response.body_length if response.prepared else 0
