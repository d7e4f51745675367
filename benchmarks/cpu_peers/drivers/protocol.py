"""How a driver talks with the comparison: JSON lines. Standard library only, for it runs in every engine's environment.

A driver is started with one argument, its settings as JSON. It answers ``{"ready": true}`` once the model is loaded and
has produced a token, and then to every line ``{"prompts": [[...], ...], "tokens": N}`` on stdin with
``{"seconds": S, "outputs": [[...], ...]}``, or with ``{"error": TEXT}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Greedy decoding of a batch of prompts to exactly so many tokens each, end-of-sequence ignored."""


def serve(load: Callable[[dict[str, Any]], Generate]) -> None:
    """Load the engine, then answer requests until stdin ends."""
    answers = take_stdout()
    generate = load(json.loads(sys.argv[1]))
    generate([[1, 2, 3, 4]], 1)
    _send(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            outputs = generate(request["prompts"], request["tokens"])
        except Exception as error:
            _send(answers, {"error": f"{type(error).__name__}: {error}"})
            continue
        _send(answers, {"seconds": time.perf_counter() - started, "outputs": outputs})


def take_stdout() -> TextIO:
    """Keep stdout for answers: whatever the engine prints, from Python or from C, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
