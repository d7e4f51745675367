"""``GET /openapi.json``: all routes, generated from the models that validate their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field, TypeAdapter

from ksana.server.json_response import json_response
from ksana.server.operations import Operation, describes, operation_of

PATH = "/openapi.json"

_SCHEMA_REF = "#/components/schemas/{model}"
_ERROR_REF = {"$ref": "#/components/responses/Error"}
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_DESCRIPTION = (
    "Every error has the same shape. 400: the body is wrong, and `param` names the field. 401: the API key is missing "
    "or wrong. 413: the body is too large. 429: the server has enough to do; `Retry-After` says when to try again. "
    "503: it shuts down. An error after a stream has begun is its last event."
)


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str | None = Field(description="machine-readable, for example context_length_exceeded")
    param: str | None = Field(description="the field at fault")


class ErrorAnswer(BaseModel):
    """The body of every answer of a status from 400 on."""

    error: ErrorDetails


def add_openapi_route(app: web.Application, *, needs_key: bool) -> None:
    """Add the route; it describes what the application has when it is first asked for."""

    @cache
    def document() -> dict[str, Any]:
        return openapi_document(app, needs_key=needs_key)

    @describes("This document")
    async def openapi(request: web.Request) -> web.Response:
        return json_response(document())

    app.router.add_get(PATH, openapi)


def openapi_document(app: web.Application, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``app``.

    Args:
        needs_key: whether clients must authenticate.
    """
    routes = list(_routes(app))
    schemas, definitions = _schemas([operation for _, _, operation in routes])
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in routes:
        paths.setdefault(path, {})[method] = _describe(method, path, operation, schemas)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Ksana", "version": metadata.version("ksana"), "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": definitions,
            "responses": {"Error": {"description": "Refused, or failed", "content": _json(schemas[ErrorAnswer])}},
        },
    }
    if needs_key:
        document["components"]["securitySchemes"] = _SECURITY_SCHEMES
        document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return document


def _routes(app: web.Application) -> Iterator[tuple[str, str, Operation]]:
    """Method in lower case, path and description of every route but those that aiohttp adds by itself."""
    for route in app.router.routes():
        if route.resource is not None and route.method not in ("HEAD", "*"):
            yield route.method.lower(), route.resource.canonical, operation_of(route.handler)


def _schemas(operations: list[Operation]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """References to the schemas of all bodies and answers, and what they refer to."""
    types: dict[Any, str] = {ErrorAnswer: "serialization"}
    types.update((operation.request, "validation") for operation in operations if operation.request is not None)
    types.update((operation.response, "serialization") for operation in operations if operation.response is not None)
    inputs: list[Any] = [(type_, mode, TypeAdapter(type_)) for type_, mode in types.items()]
    schemas, rest = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMA_REF)
    return {type_: schema for (type_, _), schema in schemas.items()}, rest.get("$defs", {})


def _describe(method: str, path: str, operation: Operation, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": operation.summary,
        "responses": {"200": _success(operation, schemas), "4XX": _ERROR_REF, "5XX": _ERROR_REF},
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(schemas[operation.request])}
    if names := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return described


def _success(operation: Operation, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    whole = schemas[operation.response] if operation.response is not None else {}
    if operation.media_type == "application/json" and not whole:
        whole = {"type": "object"}
    content = {operation.media_type: {"schema": whole}}
    if operation.stream:
        content[operation.stream] = {"schema": {"type": "string"}}
    return {"description": "Done", "content": content}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
