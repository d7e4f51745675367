"""Objects of a JSON schema that may have the properties it names, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_INTERWOVEN = frozenset(
    {"allOf", "contains", "dependentSchemas", "if", "not", "oneOf", "propertyNames", "$dynamicRef"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords that make one schema depend on what another one leaves open."""

_PARTS = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid properties that ``schema`` does not name, where it neither allows nor forbids them.

    By the letter such a schema allows any others, and a weak model that may invent properties does not stop to. What
    fits the result fits ``schema``. One whose parts depend on each other stays as it is, for closing them could make it
    mean something else.
    """
    levels = list(_levels(schema))
    if any(_INTERWOVEN & level.keys() or _is_intersection(level) for level in levels):
        return schema
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    for key in _PARTS:
        if isinstance(part := schema.get(key), dict):
            result[key] = _closed(part)
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            result[key] = [_closed(part) if isinstance(part, dict) else part for part in parts]
    for key in _TABLES:
        if isinstance(table := schema.get(key), dict):
            result[key] = {name: _closed(part) if isinstance(part, dict) else part for name, part in table.items()}
    if _is_open(schema):
        result["additionalProperties"] = False
    return result


def _is_open(schema: dict[str, Any]) -> bool:
    names = schema.get("properties")
    if not isinstance(names, dict) or schema.keys() & {"additionalProperties", "patternProperties", "minProperties"}:
        return False
    required = schema.get("required", [])
    return isinstance(required, list) and all(name in names for name in required)


def _is_intersection(schema: dict[str, Any]) -> bool:
    return "properties" in schema and bool(schema.keys() & {"anyOf", "$ref"})


def _levels(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``schema`` and all schemas within it."""
    yield schema
    parts = [schema.get(key) for key in _PARTS]
    for key in _LISTS:
        parts += found if isinstance(found := schema.get(key), list) else []
    for key in _TABLES:
        parts += found.values() if isinstance(found := schema.get(key), dict) else []
    for part in parts:
        if isinstance(part, dict):
            yield from _levels(part)
