"""Which objects of a schema are closed, and which are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from ksana_openai_api.closed_schema import close_objects

NUMBER: dict[str, Any] = {"type": "number"}
POINT: dict[str, Any] = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
CLOSED: dict[str, Any] = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (POINT, CLOSED),
        ({"type": "array", "items": POINT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/P", "$defs": {"P": POINT}}, {"$ref": "#/$defs/P", "$defs": {"P": CLOSED}}),
        (
            {"properties": {"point": POINT}, "additionalProperties": POINT},
            {"properties": {"point": CLOSED}, "additionalProperties": CLOSED},
        ),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**POINT, "additionalProperties": True},
        {**POINT, "required": ["x", "another"]},
        {**POINT, "minProperties": 2},
        {"not": POINT},
        {"oneOf": [POINT, {"properties": {"y": NUMBER}}]},
        {"allOf": [POINT, {"properties": {"y": NUMBER}}]},
        {**POINT, "anyOf": [{"properties": {"y": NUMBER}, "required": ["y"]}]},
        {"properties": {"one": {**POINT, "$ref": "#/$defs/P"}}, "$defs": {"P": {"properties": {"y": NUMBER}}}},
    ],
)
def test_what_means_something_else_when_closed_is_left_alone(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema
