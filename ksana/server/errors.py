"""Every error leaves the server in one shape, that of the OpenAI API: ``{"error": {message, type, code, param}}``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from ksana.errors import EngineDeadError, KsanaCode, RequestError
from ksana.server.json_response import json_response

logger = logging.getLogger(__name__)

RETRY_AFTER_S = {429: 1, 503: 5}
"""Seconds after which a client may try again, by the status that tells it to."""

_CHALLENGE = 'Bearer realm="ksana"'
"""How to prove who one is, as every answer 401 has to say."""

_HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON body that tells a client of ``error``."""
    return {"error": {"message": error.message, "type": error.type, "code": error.code, "param": error.param}}


def native_error_body(error: RequestError) -> dict[str, Any]:
    """The same with the numeric status of the original engine beside it, for the native API."""
    return {**error_body(error), "ksana_code": error.ksana_code}


def error_response(
    error: RequestError, *, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """The whole HTTP answer for ``error``; ``body`` replaces the usual one."""
    all_headers = dict(headers or {})
    retry_after_s = RETRY_AFTER_S.get(error.status) if error.retry_after_s is None else error.retry_after_s
    if retry_after_s is not None:
        all_headers["Retry-After"] = str(retry_after_s)
    if error.status == 401:
        all_headers["WWW-Authenticate"] = _CHALLENGE
    return json_response(body or error_body(error), status=error.status, headers=all_headers)


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Within this context the ``param`` of errors is translated, from the engine's names to those of an API."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def as_request_error(error: Exception, request_id: str) -> RequestError:
    """What to tell the client about ``error``. What nobody foresaw is logged here, and told in general words only."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPException):
        return _from_http_exception(error)
    if isinstance(error, EngineDeadError):
        return RequestError(
            "the engine has stopped; this server cannot serve any more requests",
            status=503,
            type="server_error",
            code="engine_dead",
            ksana_code=KsanaCode.RUNTIME_FAILED,
        )
    logger.error("Request %s failed unexpectedly", request_id, exc_info=error)
    return RequestError(
        f"internal server error; the server's log tells more under request id {request_id}",
        status=500,
        type="server_error",
        code="internal_error",
        ksana_code=KsanaCode.RUNTIME_FAILED,
    )


def _from_http_exception(error: web.HTTPException) -> RequestError:
    return RequestError(
        error.text or error.reason,
        status=error.status,
        type="invalid_request_error" if error.status < 500 else "server_error",
        code=_HTTP_CODES.get(error.status),
    )
