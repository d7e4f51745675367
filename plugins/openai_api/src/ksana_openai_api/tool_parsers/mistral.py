"""Mistral: after ``[TOOL_CALLS]`` a list of objects, or from the tokenizer v11 on a name and its arguments.

The newer form is ``[TOOL_CALLS]name{...}``, with ``[CALL_ID]id`` and ``[ARGS]`` between the two in some releases, and
the tag again before each further call.
"""

from __future__ import annotations

import re
import secrets
import string

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.call_object import read_call_object
from ksana_openai_api.parsing.tagged_calls import CallFormat, read_arguments

_NAME = re.compile(r"[^\s\[{]+")
_ALPHABET = string.ascii_letters + string.digits


def _new_id() -> str:
    """Mistral's templates accept no ids but of nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    first = yield from source.peek()
    if first == "[":
        yield from _read_list(source, out)
    elif first == "{":
        yield from read_call_object(source, out)
    else:
        yield from _read_named_call(source, out)


def _read_list(source: Source, out: Emitter) -> Scan[None]:
    yield from source.accept("[")
    yield from source.space()
    while (yield from read_call_object(source, out)):
        yield from source.space()
        if (yield from source.accept("]")):
            source.forget()
            return
        yield from source.accept(",")
        yield from source.space()


def _read_named_call(source: Source, out: Emitter) -> Scan[None]:
    call_id = ""
    name = yield from source.run(_NAME)
    if not name:
        return
    yield from source.space()
    if (yield from source.accept("[CALL_ID]")):
        call_id = yield from source.run(_NAME)
    yield from source.accept("[ARGS]")
    yield from read_arguments(source, out, name, (), call_id)


MISTRAL = CallFormat("mistral", _read, openers=("[TOOL_CALLS]",), needs_special_tokens=True, new_id=_new_id)
