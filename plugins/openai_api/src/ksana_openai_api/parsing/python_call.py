"""Calls written as Python: ``get_weather(city='Paris', days=3)``."""

from __future__ import annotations

import ast
import json
import re
import warnings

from ksana_openai_api.parsing.emitter import Emitter
from ksana_openai_api.parsing.source import Scan, Source

_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")
_BETWEEN = re.compile(r"[^'\"()\[\]{},]+")
_QUOTES = ("'''", '"""', "'", '"')
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 64
"""Brackets within brackets, beyond which a value is not taken apart: the standard parser is recursive."""


def read_python_calls(source: Source, out: Emitter) -> Scan[bool]:
    """Read ``[f(a=1), g()]``. Each call is given out when it is complete.

    Returns:
        True if it was such a list from its first character to its last.
    """
    called = False
    yield from source.space()
    if not (yield from source.accept("[")):
        return False
    yield from source.space()
    while not (yield from source.accept("]")):
        if not (yield from _read_call(source, out)):
            return False
        called = True
        yield from source.space()
        yield from source.accept(",")
        yield from source.space()
    if called:
        source.forget()
    return called


def _read_call(source: Source, out: Emitter) -> Scan[bool]:
    name = yield from source.run(_NAME)
    if not name or not (yield from source.accept("(")):
        return False
    members: dict[str, str] = {}
    yield from source.space()
    while not (yield from source.accept(")")):
        keyword = yield from source.run(_KEYWORD)
        yield from source.space()
        if not keyword or not (yield from source.accept("=")):
            return False
        value = yield from _read_value(source)
        if value is None:
            return False
        members[keyword] = to_json(value)
        yield from source.accept(",")
        yield from source.space()
    out.start_call(name)
    out.arguments("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items()) + "}")
    source.forget()
    return True


def _read_value(source: Source) -> Scan[str | None]:
    """The source of a value, up to a comma or parenthesis outside it; None if the text ends before."""
    pieces: list[str] = []
    closing: list[str] = []
    while character := (yield from source.peek()):
        if not closing and character in ",)":
            return "".join(pieces).strip() or None
        if quote := (yield from source.accept(*_QUOTES)):
            yield from _read_string(source, quote, pieces)
        elif run := source.available_run(_BETWEEN):
            pieces.append(run)
        else:
            if character in _CLOSING:
                closing.append(_CLOSING[character])
            elif closing and character == closing[-1]:
                closing.pop()
            elif character != ",":
                return None
            if len(closing) > _MAX_DEPTH:
                return None
            yield from source.copy_character(pieces.append)
    return None


def _read_string(source: Source, quote: str, pieces: list[str]) -> Scan[None]:
    pieces.append(quote)
    while (yield from source.peek()):
        if (yield from source.accept(quote)):
            pieces.append(quote)
            return
        if (yield from source.accept("\n")):
            # Models break lines inside quotes that Python wants on one.
            pieces.append("\n" if len(quote) == 3 else "\\n")
            continue
        if (yield from source.accept("\\")):
            pieces.append("\\")
        yield from source.copy_character(pieces.append)


def to_json(value: str) -> str:
    """A Python literal as JSON; what is no literal becomes a string of the text as it stands.

    JSON's own ``true``, ``false`` and ``null`` are understood: models mix the languages.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python leaves as they are
            return _dump(_literal(ast.parse(value, mode="eval").body))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _dump(value)


def _dump(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A lone surrogate can be escaped in JSON, but not encoded in UTF-8.
    return text if text.isascii() or _is_encodable(text) else json.dumps(value, allow_nan=False)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> object:
    if not isinstance(node, ast.Constant):
        raise ValueError("not a key of JSON")
    return node.value
