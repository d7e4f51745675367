"""Replay of a trace: who asked when, for how much, and which parts of the prompts were the same.

A trace is a file of JSON lines like those of the Mooncake release: ``timestamp`` (milliseconds), ``input_length`` and
``output_length`` (tokens), and ``hash_ids``, one id for each block of 512 prompt tokens. It holds no text. Equal ids
stand for equal tokens, so a prompt is put together from blocks that are drawn from their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from ksana.bench.options import ArrivalOptions, WorkloadOptions
from ksana.bench.prompt_files import parse_line
from ksana.bench.workload import BenchRequest, TokenIds, Workload, random_ids, words_of
from ksana.errors import UsageError


class TraceLine(BaseModel):
    """One request of a trace."""

    timestamp: float = Field(ge=0)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[int] = Field(default_factory=list)


def read_trace(path: Path, *, duration_s: float, limit: int | None) -> list[TraceLine]:
    """Read the requests of the first ``duration_s`` seconds, at most ``limit`` of them, in the order of time.

    Raises:
        UsageError: the file cannot be read, has no requests, or a line is of another shape.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    lines = [
        parse_line(TraceLine, line, f"--trace: {path}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise UsageError(f"--trace: {path} has no requests")
    lines.sort(key=lambda line: line.timestamp)
    end = lines[0].timestamp + duration_s * 1000
    return [line for line in lines if line.timestamp < end or line is lines[0]][:limit]


class TraceWorkload(Workload):
    """Prompts of random tokens whose shared prefixes are those of a trace, at the times of the trace.

    All lengths, that of a block among them, are scaled by one factor, so that sharing keeps its proportions.
    """

    ignores_eos = True
    has_own_arrivals = True

    def __init__(self, lines: Sequence[TraceLine], options: WorkloadOptions, *, as_text: bool) -> None:
        self._lines = [self._cut(line, options) for line in lines]
        self._options = options
        self._as_text = as_text
        self.block_size = self._scaled_block_size()
        self._block = lru_cache(maxsize=4096)(self._draw_block)

    def requests(self, run: int, arrival: ArrivalOptions) -> Iterator[BenchRequest]:
        # A warm-up with the same prompts would leave their prefixes in the cache: each run draws other tokens.
        start = self._lines[0].timestamp
        for index, line in enumerate(self._lines):
            offset_s = (line.timestamp - start) / 1000 / self._options.speedup
            yield replace(self._request(run, index), offset_s=offset_s)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "trace",
            "file": str(self._options.trace),
            "prompts": "words" if self._as_text else "token ids",
            "scale": self.block_size / self._options.trace_block_size,
            "speedup": self._options.speedup,
        }

    def _request(self, run: int, index: int) -> BenchRequest:
        line = self._lines[index]
        length = self._scaled(line.input_length)
        ids: TokenIds = []
        for hash_id in line.hash_ids:
            if len(ids) >= length:
                break
            ids += self._block(run, hash_id)
        if len(ids) < length:  # tokens behind the hashed blocks are nobody else's
            generator = np.random.default_rng([self._options.seed, run, index, 2])
            ids += random_ids(generator, self._options.token_range, length - len(ids))
        ids = ids[:length]
        return BenchRequest(words_of(ids) if self._as_text else ids, self._scaled(line.output_length))

    def _draw_block(self, run: int, hash_id: int) -> TokenIds:
        generator = np.random.default_rng([self._options.seed, run, hash_id % 2**63, 3])
        return random_ids(generator, self._options.token_range, self.block_size)

    def _scaled(self, length: int) -> int:
        return max(1, length * self.block_size // self._options.trace_block_size)

    def _scaled_block_size(self) -> int:
        options = self._options
        if options.trace_scale is not None:
            scale = options.trace_scale
        elif options.max_model_len is not None:
            scale = min(
                1.0, options.max_model_len / max(line.input_length + line.output_length for line in self._lines)
            )
        else:
            scale = 1.0
        return max(1, int(options.trace_block_size * scale))

    @staticmethod
    def _cut(line: TraceLine, options: WorkloadOptions) -> TraceLine:
        return line.model_copy(
            update={
                "input_length": min(line.input_length, options.max_input_len or line.input_length),
                "output_length": min(line.output_length, options.max_output_len or line.output_length),
            }
        )
