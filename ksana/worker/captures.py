"""Rows of prompts that requests want to have: hidden states, logits, log probabilities."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.models.base import Model
from ksana.types.capture import Capture, CapturedPart, CapturedRows
from ksana.types.step import ModelRunnerOutput, NewRequestData
from ksana.worker.input_batch import InputBatch
from ksana.worker.sampler import token_logprobs

_ROWS_AT_ONCE = 128
"""Rows whose logits are in memory at a time: those of a whole prompt would be hundreds of megabytes."""


@dataclass(slots=True)
class PlannedCapture:
    """The part of a capture that falls into a step.

    Attributes:
        request_id, index: whose, and which of its captures.
        first: as in :class:`CapturedPart`.
        rows: int64 [n], ascending, of the batch.
        next_tokens: int64 [n], for each row the prompt token that follows it.
    """

    request_id: str
    index: int
    capture: Capture
    first: int
    rows: np.ndarray
    next_tokens: np.ndarray


class CaptureReader:
    """Knows what the running requests want to have captured, and reads it from each step.

    Args:
        model, backend: of the runner.
        batch: the requests' rows.
    """

    def __init__(self, model: Model, backend: KernelBackend, batch: InputBatch) -> None:
        self._model = model
        self._backend = backend
        self._batch = batch
        self._requests: dict[str, NewRequestData] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request: NewRequestData) -> None:
        """Start a request; most capture nothing."""
        if request.captures:
            self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Forget a request, known or not."""
        self._requests.pop(request_id, None)

    def plan(self, rows: np.ndarray, counts: np.ndarray, query_starts: np.ndarray) -> list[PlannedCapture]:
        """What falls into a step.

        Args:
            rows: int64 [R], the step's requests in the input batch, before they advance.
            counts: int64 [R], tokens of each in the step.
            query_starts: int64 [R + 1], first row of each in the step's batch.
        """
        planned: list[PlannedCapture] = []
        for row, count, query_start in zip(rows.tolist(), counts.tolist(), query_starts.tolist(), strict=False):
            request = self._requests.get(self._batch.request_ids[row])
            if request is not None:
                start = int(self._batch.num_computed[row])
                planned += self._plan_request(request, start, start + count, query_start)
        return planned

    def read(
        self, planned: list[PlannedCapture], hidden: torch.Tensor, output_rows: np.ndarray, output: ModelRunnerOutput
    ) -> None:
        """Read what was planned.

        Args:
            hidden: [n, hidden_size] after the last layer.
            output_rows: int64 [n], ascending, which rows of the batch they are; all that were planned are among them.
            output: gets the parts.
        """
        for part in planned:
            places = torch.from_numpy(np.searchsorted(output_rows, part.rows)).to(hidden.device)
            found = CapturedPart(part.index, part.first, self._rows(part, hidden[places]))
            output.captured.setdefault(part.request_id, []).append(found)

    def _plan_request(
        self, request: NewRequestData, start: int, end: int, query_start: int
    ) -> Iterator[PlannedCapture]:
        prompt = request.token_ids[: request.num_prompt_tokens]
        for index, capture in enumerate(request.captures):
            first, last = bisect_left(capture.positions, start), bisect_left(capture.positions, end)
            if first < last:
                positions = capture.positions[first:last]
                next_tokens = [prompt[position + 1] if position + 1 < len(prompt) else 0 for position in positions]
                rows = np.array(positions, dtype=np.int64) - start + query_start
                yield PlannedCapture(request.request_id, index, capture, first, rows, np.array(next_tokens))

    def _rows(self, part: PlannedCapture, hidden: torch.Tensor) -> CapturedRows:
        kind = part.capture.kind
        if kind == "hidden":
            return _to_numpy(hidden)
        normed = self._model.final_norm(hidden)
        if kind == "normed":
            return _to_numpy(normed)
        if kind == "mean":
            # In float64, where how a prompt was cut into steps hardly ever changes a sum.
            total: np.ndarray = _to_numpy(normed).sum(axis=0, dtype=np.float64, keepdims=True)
            return total
        if kind == "logits":
            return np.concatenate([_to_numpy(logits) for _, logits in self._logits(normed)])
        counts = np.full(len(part.rows), part.capture.top)
        return [
            entry
            for start, logits in self._logits(normed)
            for entry in token_logprobs(
                self._backend,
                logits,
                part.next_tokens[start : start + len(logits)],
                counts[start : start + len(logits)],
            )
        ]

    def _logits(self, normed: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, len(normed), _ROWS_AT_ONCE):
            yield start, self._model.compute_logits(normed[start : start + _ROWS_AT_ONCE])


def _to_numpy(rows: torch.Tensor) -> np.ndarray:
    array: np.ndarray = rows.float().cpu().numpy()
    return array
