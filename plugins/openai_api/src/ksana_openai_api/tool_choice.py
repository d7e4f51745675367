"""Which tools a model may or must call, how that is enforced, and how forced calls are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ksana.errors import RequestError
from ksana.text.parsing import OutputParser
from ksana.types.grammar import GrammarSpec
from ksana_openai_api.closed_schema import close_objects
from ksana_openai_api.parsing import Emitter, Scan, ScanParser, Source
from ksana_openai_api.parsing.call_object import read_call_object
from ksana_openai_api.parsing.json_value import copy_value
from ksana_openai_api.requests import ChatCompletionRequest, NamedToolChoice, Tool
from ksana_openai_api.structure import schema_grammar


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request says about tools.

    Attributes:
        tools: as the chat template gets them; empty if none may be called.
        auto: the model decides, and writes calls in its own format.
        grammar: what a forced call must look like; None if none is forced.
        forced_name: the one function that must be called, if the request names it.
        parallel: more than one call is welcome.
    """

    tools: tuple[dict[str, Any], ...] = ()
    auto: bool = False
    grammar: GrammarSpec | None = None
    forced_name: str | None = None
    parallel: bool = True

    def forced_parser(self) -> OutputParser:
        """Reads what ``grammar`` lets through: arguments alone if the name is known, else a list of calls."""
        name = self.forced_name
        return ScanParser(_scan_list if name is None else partial(_scan_arguments, name))


def choose_tools(body: ChatCompletionRequest, *, auto_possible: bool) -> ToolChoice:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        auto_possible: the operator has chosen a format in which to read a model's calls.

    Raises:
        RequestError: they contradict each other, or the operator has not chosen a format.
    """
    tools = body.tools or []
    choice = body.tool_choice or ("auto" if tools else "none")
    if choice == "none":
        return ToolChoice()
    if not tools:
        raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
    described = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    parallel = body.parallel_tool_calls is not False
    if choice == "auto":
        if not auto_possible:
            raise RequestError(
                "tools that the model may call by itself need a server that was started with --enable-auto-tool-choice "
                'and --tool-call-parser; tool_choice "required", or one that names a function, works without',
                code="unsupported_parameter",
                param="tool_choice" if body.tool_choice else "tools",
            )
        return ToolChoice(described, auto=True, parallel=parallel)
    if isinstance(choice, NamedToolChoice):
        schema = _parameters(_named(tools, choice.function.name))
        return ToolChoice(described, grammar=schema_grammar(schema), forced_name=choice.function.name)
    return ToolChoice(described, grammar=schema_grammar(_list_schema(tools, parallel)), parallel=parallel)


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _list_schema(tools: list[Tool], parallel: bool) -> dict[str, Any]:
    """One call at least."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, f"#/items/anyOf/{index}") for index, tool in enumerate(tools)]},
    }
    return schema if parallel else {**schema, "maxItems": 1}


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """A call of ``tool``, for a schema that has it at ``place``, a JSON pointer."""
    arguments = _moved(close_objects(_parameters(tool)), f"{place}/properties/arguments")
    properties = {"name": {"const": tool.function.name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """``schema`` for ``place``: what refers to a part of it finds it there."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _scan_arguments(name: str, source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    if (yield from source.peek()):
        out.start_call(name)
        yield from copy_value(source, out.arguments)
    yield from _scan_rest(source)


def _scan_list(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    yield from source.accept("[")
    yield from source.space()
    while (yield from read_call_object(source, out)):
        yield from source.space()
        yield from source.accept(",")
        yield from source.space()
    yield from _scan_rest(source)


def _scan_rest(source: Source) -> Scan[None]:
    """The grammar lets nothing through behind the value, so what is left is no loss."""
    while (yield from source.peek()):
        yield from source.copy_character(lambda _: None)
