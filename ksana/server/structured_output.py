"""Structured output as ``POST /generate`` asks for it."""

from __future__ import annotations

import json

from ksana.errors import RequestError
from ksana.server.generate_request import GenerateRequest
from ksana.text.tokenizer import Tokenizer
from ksana.types.grammar import GrammarSpec

THINK_END = "</think>"


def grammar_of(body: GenerateRequest) -> GrammarSpec | None:
    """What the answer must look like, if anything.

    Raises:
        RequestError: a regular expression and JSON are asked for at once, or the text is too long.
    """
    regex = body.structured_output_regex
    wants_json = _wants_json(body)
    if regex and wants_json:
        raise RequestError(
            f"structured_output_regex and {grammar_param(body)} exclude each other", param="structured_output_regex"
        )
    if regex:
        return GrammarSpec("regex", regex)
    if not wants_json:
        return None
    schema = body.sampling_config.json_schema
    if not schema:
        return GrammarSpec("json_object")
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def grammar_param(body: GenerateRequest) -> str:
    """The field of the body that a grammar comes from, for errors."""
    if not _wants_json(body):
        return "structured_output_regex"
    config = body.sampling_config
    return f"sampling_config.{'json_schema' if config.json_schema else 'enable_structured_output'}"


def grammar_start(body: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """With ``enable_thinking``, what ends the thinking, to which no grammar applies; empty if it applies at once."""
    if not body.sampling_config.enable_thinking:
        return ()
    end = tokenizer.encode(THINK_END, add_special_tokens=False)
    return tuple(end) if len(end) == 1 else ()  # else this is no model that thinks


def _wants_json(body: GenerateRequest) -> bool:
    config = body.sampling_config
    asked = config.enable_structured_output
    return bool(config.json_schema) if asked is None else asked
