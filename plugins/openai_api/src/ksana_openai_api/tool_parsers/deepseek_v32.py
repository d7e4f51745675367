"""DeepSeek V3.2: a markup with an element for each call and one for each parameter.

A parameter marked ``string="true"`` is text as it stands, any other is JSON. A call may hold one JSON object instead of
parameters.
"""

from __future__ import annotations

import json
import re

from ksana_openai_api.parsing import Emitter, Scan, Source, Tags
from ksana_openai_api.parsing.call_object import NO_ARGUMENTS
from ksana_openai_api.parsing.json_value import copy_value
from ksana_openai_api.parsing.tagged_calls import CallFormat

_SECTION_BEGIN = "<｜DSML｜function_calls>"
_SECTION_END = "</｜DSML｜function_calls>"
_CALL_BEGIN = '<｜DSML｜invoke name="'
_CALL_END = "</｜DSML｜invoke>"
_PARAMETER_BEGIN = '<｜DSML｜parameter name="'
_PARAMETER_END = "</｜DSML｜parameter>"
_TAG_END = '">'
_TEXT_PARAMETER = '" string="true">'
_JSON_PARAMETER = '" string="false">'

_ATTRIBUTE = re.compile(r'[^"\n]+')
_VALUE_END = Tags(_PARAMETER_END)


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    yield from source.accept(_CALL_BEGIN)
    name = yield from source.run(_ATTRIBUTE)
    if not name or not (yield from source.accept(_TAG_END)):
        return
    out.start_call(name)
    source.forget()
    yield from source.space()
    if (yield from source.peek()) == "{":
        yield from copy_value(source, out.arguments)
        source.forget()
    else:
        yield from _read_parameters(source, out)


def _read_parameters(source: Source, out: Emitter) -> Scan[None]:
    before = "{"
    while (yield from source.accept(_PARAMETER_BEGIN)):
        key = yield from source.run(_ATTRIBUTE)
        kind = yield from source.accept(_TEXT_PARAMETER, _JSON_PARAMETER, _TAG_END)
        if not kind:
            break
        out.arguments(f"{before}{_dump(key)}: ")
        before = ", "
        yield from (_copy_text(source, out) if kind == _TEXT_PARAMETER else _copy_json(source, out))
        source.forget()
        yield from source.space()
    if (yield from source.accept(_CALL_END, _SECTION_END)):
        out.arguments(NO_ARGUMENTS if before == "{" else "}")
        source.forget()


def _copy_text(source: Source, out: Emitter) -> Scan[None]:
    out.arguments('"')
    if (yield from source.copy_until(_VALUE_END, lambda piece: out.arguments(_dump(piece)[1:-1]))):
        out.arguments('"')


def _copy_json(source: Source, out: Emitter) -> Scan[None]:
    pieces: list[str] = []
    complete = yield from source.copy_until(_VALUE_END, pieces.append)
    value = "".join(pieces).strip()
    out.arguments(_dump(value) if complete and not _is_json(value) else value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _dump(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


DEEPSEEK_V32 = CallFormat(
    "deepseek_v32",
    _read,
    openers=(_SECTION_BEGIN, _CALL_BEGIN),
    closers=(_PARAMETER_END, _CALL_END, _SECTION_END),
    needs_special_tokens=True,
)
