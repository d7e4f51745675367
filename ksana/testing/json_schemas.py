"""Random JSON schemas, of the kind that clients send, for those who test a grammar compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "age", "tags", "price", "address", "is_open", "created at", "größe", "items", "unit-id", "note", "x")
_PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]+$", r"^\d{3}-\d{2}$", "^(red|green|blue)$", "^[^ ]{1,8}$")
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4")
_CONSTANTS = ("yes", "no", 'say "hi"', "two\nlines", "日本", 7, -1, 2.5, True, False, None)


def random_schema(seed: int, depth: int = 3) -> Schema:
    """A schema of an object, up to ``depth`` levels deep; the same for the same seed. It has instances."""
    draw = random.Random(seed)
    schema = _object(draw, depth)
    if draw.random() < 0.1:
        schema["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    if draw.random() < 0.2:
        schema["$defs"] = {"part": _any(draw, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enumeration, _constant, _simple]
    if depth > 0:
        kinds += [
            lambda draw: _object(draw, depth - 1),
            lambda draw: _array(draw, depth - 1),
            lambda draw: _tuple(draw, depth - 1),
            lambda draw: {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]},
        ]
    return draw.choice(kinds)(draw)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_NAMES, draw.randint(1, 5))
    schema: Schema = {"type": "object", "properties": {name: _any(draw, depth) for name in names}}
    schema["required"] = [name for name in names if draw.random() < 0.7]
    rest = draw.random()
    if rest < 0.7:
        schema["additionalProperties"] = False
    elif rest < 0.8:
        schema["additionalProperties"] = _integer(draw)
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(draw, depth)}
    if draw.random() < 0.4:
        schema["minItems"] = draw.randint(0, 3)
    if draw.random() < 0.6:
        schema["maxItems"] = draw.randint(3, 6)
    return schema


def _tuple(draw: random.Random, depth: int) -> Schema:
    count = draw.randint(1, 3)
    items = [_any(draw, depth) for _ in range(count)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": draw.randint(0, count)}


def _string(draw: random.Random) -> Schema:
    kind = draw.random()
    if kind < 0.2:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    if kind < 0.7:
        shortest = draw.randint(0, 4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + draw.randint(0, 12)}
    return {"type": "string"}


def _integer(draw: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    if draw.random() < 0.5:
        schema["minimum"] = draw.randint(-1000, 100)
    if draw.random() < 0.5:
        schema[draw.choice(("maximum", "exclusiveMaximum"))] = draw.randint(101, 5000)
    return schema


def _number(draw: random.Random) -> Schema:
    schema: Schema = {"type": "number"}
    if draw.random() < 0.5:
        schema[draw.choice(("minimum", "exclusiveMinimum"))] = round(draw.uniform(-100, 0), 2)
    if draw.random() < 0.5:
        schema["maximum"] = round(draw.uniform(1, 1000), 2)
    return schema


def _enumeration(draw: random.Random) -> Schema:
    return {"enum": draw.sample(_CONSTANTS, draw.randint(1, 4))}


def _constant(draw: random.Random) -> Schema:
    return {"const": draw.choice(_CONSTANTS)}


def _simple(draw: random.Random) -> Schema:
    return {"type": draw.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}
