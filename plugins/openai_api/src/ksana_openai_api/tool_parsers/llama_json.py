"""Llama 3.1 to 4: objects with ``parameters``, separated by semicolons, for which the whole answer is used.

A call begins the answer or follows ``<|python_tag|>``.
"""

from __future__ import annotations

from ksana_openai_api.parsing import Emitter, Scan, Source
from ksana_openai_api.parsing.call_object import read_call_object
from ksana_openai_api.parsing.tagged_calls import CallFormat


def _read(source: Source, out: Emitter) -> Scan[None]:
    yield from source.space()
    while (yield from read_call_object(source, out, strict=True)):
        yield from source.space()
        yield from source.accept(";", ",")
        yield from source.space()


LLAMA3_JSON = CallFormat("llama3_json", _read, openers=("<|python_tag|>",), at_start=True)
LLAMA4_JSON = CallFormat("llama4_json", _read, openers=("<|python_tag|>",), at_start=True)
