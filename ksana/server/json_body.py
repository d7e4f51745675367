"""JSON on its way in: from bytes nobody can trust to a validated model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from ksana.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
"""Seconds that a client gets to send its whole body."""

_MESSAGES = {"model_type": "Input should be an object", "dict_type": "Input should be an object"}
"""By pydantic's type of an error, where its own words are about Python."""

_FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})


async def read_json(request: web.Request, model: type[Model]) -> Model:
    """Read, parse and validate the body of ``request``.

    Parsing stays on the event loop: the parser holds the interpreter lock from the first byte to the last, so that a
    thread would block the loop just as long (60 ms for 8 MiB of token ids) and cost two switches more.

    Returns:
        An instance of ``model``.

    Raises:
        RequestError: 415 for another content type, 413 for a body over the server's limit, 408 for one that does not
            arrive, 400 for one that is wrongly encoded, for text that is not a JSON object or does not fit the model;
            ``param`` names the field.
    """
    _check_content_type(request)
    return validate_body(parse_json(await read_body(request)), model)


def validate_body(body: object, model: type[Model]) -> Model:
    """An instance of ``model`` out of a body that has been parsed.

    Raises:
        RequestError: 400 for what is no object or does not fit the model; ``param`` names the field.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_error(error, body) from None


def parse_json(data: bytes) -> Any:
    """Parse ``data``; NaN, lone surrogates and nesting bombs are refused like all that is not JSON.

    Raises:
        RequestError: 400 with the line and the column.
    """
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def is_json(content_type: str) -> bool:
    """True for the media types, without parameters, of JSON."""
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


def _check_content_type(request: web.Request) -> None:
    if "Content-Type" not in request.headers:
        return
    content_type = request.content_type
    if is_json(content_type):
        return
    hint = " (with curl: -H 'Content-Type: application/json')" if content_type in _FORM_TYPES else ""
    raise RequestError(
        f"the body must be sent as Content-Type: application/json{hint}, not {content_type}",
        status=415,
        code="unsupported_media_type",
    )


async def read_body(request: web.Request) -> bytes:
    """All bytes of the body.

    Raises:
        RequestError: 413 for one over the server's limit, 408 for one that does not arrive, 400 for one that is wrongly
            encoded.
    """
    try:
        return await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise RequestError(
            f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds", status=408, code="request_timeout"
        ) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {_reason(error)}", code="invalid_body") from None


def _reason(error: Exception) -> str:
    """The message of what an aiohttp error wraps, in one line."""
    cause = error.__cause__ or error
    return " ".join(str(getattr(cause, "message", "") or cause).split())


def _first_error(error: ValidationError, body: object) -> RequestError:
    """The first error, in words for the client; of a union's errors those that got furthest into the body."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    field = errors[0]["loc"][:1]
    paths = [
        (_field_path(each["loc"], body, each["type"] == "missing"), _MESSAGES.get(each["type"], each["msg"]))
        for each in errors
        if each["loc"][:1] == field
    ]
    param = max((path for path, _ in paths), key=lambda path: path.count(".") + path.count("["))
    message = _any_of([message for path, message in paths if path == param])
    return RequestError(f"{param}: {message}" if param else message, param=param or None)


def _any_of(messages: Sequence[str]) -> str:
    """What the members of a union say of one field: ``Input should be a valid boolean, or 'never'``."""
    first, *others = dict.fromkeys(messages)
    return ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])


def _field_path(location: Sequence[int | str], body: object, is_missing: bool) -> str:
    """``messages[0].content`` for a location of pydantic's, less the names of union members that it mixes in.

    Args:
        is_missing: the body lacks the last field of the location.
    """
    path = ""
    value = body
    for number, step in enumerate(location, 1):
        if isinstance(value, list) and isinstance(step, int):
            path += f"[{step}]"
            value = value[step] if step < len(value) else None
        elif isinstance(value, dict) and (step in value or (is_missing and number == len(location))):
            path += f".{step}" if path else str(step)
            value = value.get(step)
    return path
