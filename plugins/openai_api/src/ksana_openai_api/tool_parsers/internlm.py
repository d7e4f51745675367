"""InternLM 2 and 3: an object after ``<|action_start|><|plugin|>``, with ``parameters`` for arguments."""

from __future__ import annotations

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.call_object import read_call_object
from ksana_openai_api.parsing.tagged_calls import CallFormat


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    if (yield from source.accept("<|plugin|>")):  # another word stands for code to interpret
        yield from source.space()
        yield from read_call_object(source, out)


INTERNLM = CallFormat(
    "internlm", _read, openers=("<|action_start|>",), closers=("<|action_end|>",), needs_special_tokens=True
)
