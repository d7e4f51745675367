"""From ``response_format``, ``structured_outputs`` and the ``guided_*`` fields to what the engine enforces."""

from __future__ import annotations

import json

from ksana.errors import RequestError
from ksana.types.grammar import GrammarSpec
from ksana_openai_api.closed_schema import close_objects
from ksana_openai_api.requests import GenerationRequest, ResponseFormat, StructuredOutputs

Schema = dict[str, object] | bool | str

_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def grammar_of(body: GenerationRequest) -> GrammarSpec | None:
    """The structure that ``body`` asks for, or None.

    Raises:
        RequestError: it asks for several, or for one that is incomplete.
    """
    found: list[tuple[str, GrammarSpec]] = []
    if body.response_format is not None:
        found += [("response_format", spec) for spec in _of_response_format(body.response_format)]
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _of_structured_outputs(body.structured_outputs)))
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    found += _specs(guided, "guided_")
    if len(found) > 1:
        raise RequestError(f"{found[0][0]} and {found[1][0]} exclude each other; give one", param=found[1][0])
    return found[0][1] if found else None


def grammar_param(body: GenerationRequest) -> str | None:
    """The field of ``body`` that its structure comes from, for errors; None if it asks for none."""
    return next((name for name in _FIELDS if getattr(body, name) is not None), None)


def schema_grammar(schema: Schema) -> GrammarSpec:
    """The grammar of texts that are JSON and valid under ``schema``, which may be JSON text itself."""
    if isinstance(schema, dict):
        schema = close_objects(schema)
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _of_response_format(wanted: ResponseFormat) -> list[GrammarSpec]:
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [GrammarSpec("json_object")]
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        param = "response_format.json_schema" + ("" if wanted.json_schema is None else ".schema")
        raise RequestError(f"{param} is required for this type", param=param)
    return [schema_grammar(wanted.json_schema.schema_)]


def _of_structured_outputs(wanted: StructuredOutputs) -> GrammarSpec:
    specs = _specs(wanted, "structured_outputs.")
    if len(specs) != 1:
        raise RequestError(
            "structured_outputs needs exactly one of json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    return specs[0][1]


def _specs(wanted: StructuredOutputs, prefix: str) -> list[tuple[str, GrammarSpec]]:
    found = []
    if wanted.json_ is not None:
        found.append((f"{prefix}json", schema_grammar(wanted.json_)))
    if wanted.regex is not None:
        found.append((f"{prefix}regex", GrammarSpec("regex", wanted.regex)))
    if wanted.choice is not None:
        found.append((f"{prefix}choice", GrammarSpec("choice", json.dumps(wanted.choice))))
    if wanted.grammar is not None:
        found.append((f"{prefix}grammar", GrammarSpec("ebnf", wanted.grammar)))
    if wanted.json_object:
        found.append((f"{prefix}json_object", GrammarSpec("json_object")))
    return found
