"""Kimi K2: each call has an id, ``functions.NAME:INDEX``, that holds its name."""

from __future__ import annotations

import re

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.tagged_calls import CallFormat, read_arguments

_SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL_BEGIN = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"

_WORD = re.compile(r"[^\s<]+")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    yield from source.accept(_CALL_BEGIN)
    yield from source.space()
    word = yield from source.run(_WORD)
    yield from source.space()
    if word and (yield from source.accept(_ARGUMENTS_BEGIN)):
        native = _ID.fullmatch(word)
        name = native["name"] if native else word.removeprefix("functions.")
        yield from read_arguments(source, out, name, (_CALL_END,), word if native else "")


KIMI_K2 = CallFormat(
    "kimi_k2",
    _read,
    openers=(*_SECTION_BEGIN, _CALL_BEGIN),
    closers=(_CALL_END, *_SECTION_END),
    needs_special_tokens=True,
)
