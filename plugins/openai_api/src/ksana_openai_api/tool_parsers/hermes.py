"""Hermes 2 and 3, Qwen2.5 and Qwen3: an object between ``<tool_call>`` and ``</tool_call>`` for each call."""

from __future__ import annotations

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.call_object import read_call_object
from ksana_openai_api.parsing.tagged_calls import CallFormat


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    yield from read_call_object(source, out)


HERMES = CallFormat("hermes", _read, openers=("<tool_call>",), closers=("</tool_call>",))
