"""Llama 3.2, Llama 4 and others: a list of calls in Python that begins the answer.

Llama 4 puts it between ``<|python_start|>`` and ``<|python_end|>``, and sometimes forgets to.
"""

from __future__ import annotations

from ksana_openai_api.parsing.python_call import read_python_calls
from ksana_openai_api.parsing.tagged_calls import CallFormat

PYTHONIC = CallFormat("pythonic", read_python_calls, at_start=True)
LLAMA4_PYTHONIC = CallFormat(
    "llama4_pythonic",
    read_python_calls,
    openers=("<|python_start|>",),
    closers=("<|python_end|>",),
    at_start=True,
)
