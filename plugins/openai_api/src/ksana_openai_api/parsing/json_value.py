"""JSON as a model writes it: copied character by character, never parsed and written anew.

Only the shape is followed: brackets, strings and their escapes. So large arguments cost time in proportion to their
length, reach the client while they are generated, and keep every digit and every escape.
"""

from __future__ import annotations

import json
import re

from ksana_openai_api.parsing.source import Scan, Source, Write

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN_BRACKETS = re.compile(r"[\s0-9A-Za-z+\-.,:]+")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSING = {"{": "}", "[": "]"}


def copy_value(source: Source, write: Write) -> Scan[bool]:
    """Copy one JSON value. False if the text ends, or is no JSON any more, before the value is complete."""
    first = yield from source.peek()
    if first == '"':
        return (yield from _copy_string(source, write))
    if first in _CLOSING:
        return (yield from _copy_container(source, write))
    scalar = yield from source.run(_SCALAR)
    write(scalar)
    return bool(scalar)


def read_string(source: Source) -> Scan[str | None]:
    """Read a JSON string and return what it stands for; None if there is none or it is incomplete."""
    if (yield from source.peek()) != '"':
        return None
    pieces: list[str] = []
    complete = yield from _copy_string(source, pieces.append)
    return decode_string("".join(pieces)) if complete else None


def decode_string(literal: str) -> str | None:
    """What a JSON string stands for, in characters that UTF-8 can encode; None if it has wrong escapes."""
    try:
        value: str = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _copy_container(source: Source, write: Write) -> Scan[bool]:
    closing: list[str] = []
    while character := (yield from source.peek()):
        if character == '"':
            if not (yield from _copy_string(source, write)):
                return False
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            yield from source.copy_character(write)
        elif character == closing[-1]:
            closing.pop()
            yield from source.copy_character(write)
            if not closing:
                return True
        elif run := source.available_run(_BETWEEN_BRACKETS):
            write(run)
        else:
            return False
    return False


def _copy_string(source: Source, write: Write) -> Scan[bool]:
    yield from source.copy_character(write)
    while character := (yield from source.peek()):
        if run := source.available_run(_IN_STRING):
            write(run)
            continue
        yield from source.copy_character(write)
        if character == '"':
            return True
        yield from source.copy_character(write)
    return False
