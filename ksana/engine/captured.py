"""Puts together what steps have captured of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana.types.capture import Capture, CapturedPart, CapturedRows
from ksana.types.output import TokenLogprobs


class CapturedPrompt:
    """The rows of one prompt, for all sequences that share it.

    Parts may come twice, after a preemption or because a sequence had to compute the prompt again, from the first
    captured position on: rows are equal, and sums begin anew.

    Args:
        captures: of the request.
    """

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._rows: list[list[np.ndarray | TokenLogprobs | None]] = [[None] * _num_rows(c) for c in captures]
        self._sums: dict[int, np.ndarray] = {}

    def add(self, parts: Sequence[CapturedPart]) -> None:
        """Take in what a step has captured."""
        for part in parts:
            if isinstance(part.rows, np.ndarray) and self._captures[part.capture].kind == "mean":
                before = self._sums[part.capture] if part.first else 0.0
                self._sums[part.capture] = before + part.rows
                continue
            self._rows[part.capture][part.first : part.first + len(part.rows)] = list(part.rows)

    def results(self) -> list[CapturedRows]:
        """One for each capture, in order. Call it once the prompt is computed."""
        return [self._result(index) for index in range(len(self._captures))]

    def _result(self, index: int) -> CapturedRows:
        rows = self._rows[index]
        kind = self._captures[index].kind
        if kind == "mean":
            return (self._sums[index] / len(self._captures[index].positions)).astype(np.float32)
        if kind == "logprobs":
            return [row for row in rows if isinstance(row, TokenLogprobs)]
        return np.stack([row for row in rows if isinstance(row, np.ndarray)])


def _num_rows(capture: Capture) -> int:
    """Rows to be kept until all are there."""
    return 0 if capture.kind == "mean" else len(capture.positions)
