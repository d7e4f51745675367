"""DeepSeek V3 and R1, which fence the arguments as Markdown does, and V3.1, which does not."""

from __future__ import annotations

import re

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.tagged_calls import CallFormat, read_arguments

_SECTION_BEGIN = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"

_NAME = re.compile(r"[^\s<`{]+")


def _read_v3(source: Source, out: Emitter) -> Scan[None]:
    kind = yield from _read_word(source)
    if not kind or not (yield from source.accept(_SEPARATOR)):
        return
    name = yield from source.run(_NAME)
    yield from source.space()
    yield from source.accept(_FENCE + "json", _FENCE)
    if name and (yield from read_arguments(source, out, name, (_FENCE, _CALL_END))):
        yield from source.space()
        if (yield from source.accept(_FENCE)):
            source.forget()


def _read_v31(source: Source, out: Emitter) -> Scan[None]:
    name = yield from _read_word(source)
    if name and (yield from source.accept(_SEPARATOR)):
        yield from read_arguments(source, out, name, (_CALL_END,))


def _read_word(source: Source) -> Scan[str]:
    yield from source.space()
    yield from source.accept(_CALL_BEGIN)
    yield from source.space()
    word = yield from source.run(_NAME)
    yield from source.space()
    return word


_OPENERS = (_SECTION_BEGIN, _CALL_BEGIN)
_CLOSERS = (_CALL_END, _SECTION_END)

DEEPSEEK_V3 = CallFormat("deepseek_v3", _read_v3, _OPENERS, _CLOSERS)
DEEPSEEK_V31 = CallFormat("deepseek_v31", _read_v31, _OPENERS, _CLOSERS)
