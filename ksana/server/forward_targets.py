"""The targets of one prompt of ``/forward``: what they capture of it, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ksana.errors import KsanaCode, RequestError
from ksana.server.forward_checks import GATHER_TOKEN_ID, check_target, mode_of
from ksana.server.forward_positions import positions_of_slices, positions_of_tokens
from ksana.server.forward_request import RequestTarget
from ksana.server.tensors import encode_tensor
from ksana.types.capture import Capture, CapturedRows, CaptureKind
from ksana.types.model import ModelConfig
from ksana.types.output import RequestOutput, TokenLogprobs

_KINDS: dict[str, CaptureKind] = {"transformer": "hidden", "layernorm": "normed", "logits": "logits"}

_LOGPROB_BYTES = 128
"""Of one log probability with its token, as Python has them and with what becomes of them."""


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """What a prompt may ask for.

    Attributes:
        max_logits_rows: positions whose whole logits are sent.
        take: called with the bytes of each result before it is computed; raises RequestError if they are too many.
    """

    max_logits_rows: int
    take: Callable[[int], None]


class PromptTargets:
    """Plans captures once the prompt is tokenised, and makes an answer of them once they are there.

    Args:
        targets: the client's; of several with one name the first counts.
        param: where in the body they are.

    Raises:
        RequestError: a target is not possible.
    """

    def __init__(self, targets: Sequence[RequestTarget], param: str, model: ModelConfig, limits: ForwardLimits) -> None:
        self._model = model
        self._limits = limits
        self._targets: dict[str, tuple[str, RequestTarget]] = {}
        for index, target in enumerate(targets):
            check_target(target, f"{param}[{index}]")
            self._targets.setdefault(target.target_name or "", (f"{param}[{index}]", target))
        self._captured_names: list[str] = []

    def plan(self, token_ids: Sequence[int]) -> list[Capture]:
        """What to capture: the draft's :data:`ksana.types.capture.CapturePlan`."""
        captures = []
        for name, (param, target) in self._targets.items():
            positions = _positions(target, token_ids, param)
            if positions:
                captures.append(self._capture(target, positions, param))
                self._captured_names.append(name)
        return captures

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The object for this prompt among ``responses``. Slow if it is large; may run in a thread."""
        captured = dict(zip(self._captured_names, output.captured, strict=True))
        tensors = [
            {"target_name": name, "tensor": self._tensor(target, captured.get(name))}
            for name, (_, target) in self._targets.items()
        ]
        return {
            "input_token_ids": output.prompt_token_ids,
            "input_top_logprobs": self._top_logprobs(captured),
            "response": tensors,
        }

    def _capture(self, target: RequestTarget, positions: list[int], param: str) -> Capture:
        if mode_of(target) == GATHER_TOKEN_ID:
            top = target.input_top_logprobs_num or 0
            self._limits.take(len(positions) * (1 + top) * _LOGPROB_BYTES)
            return Capture("logprobs", positions, top)
        if target.target_name == "logits" and len(positions) > self._limits.max_logits_rows:
            raise RequestError(
                f"input length or logits_custom_length exceeds the limit: logits of {len(positions)} positions are "
                f"wanted, at most {self._limits.max_logits_rows} are possible; {GATHER_TOKEN_ID} has no such limit",
                code="too_many_logits",
                param=f"{param}.slice_pos",
                ksana_code=KsanaCode.LENGTH_EXCEEDED,
            )
        self._limits.take(len(positions) * self._width(target) * np.dtype(np.float32).itemsize)
        return Capture(_KINDS[target.target_name or ""], positions)

    def _width(self, target: RequestTarget) -> int:
        return self._model.vocab_size if target.target_name == "logits" else self._model.hidden_size

    def _tensor(self, target: RequestTarget, rows: CapturedRows | None) -> dict[str, Any]:
        """Probabilities are float32; everything else has the model's dtype."""
        if mode_of(target) == GATHER_TOKEN_ID:
            entries = cast("list[TokenLogprobs]", rows or [])
            return encode_tensor(np.exp([entry.logprob for entry in entries], dtype=np.float32), "float32")
        if rows is None:
            rows = np.empty((0, self._width(target)), dtype=np.float32)
        return encode_tensor(cast("np.ndarray", rows), self._model.dtype)

    def _top_logprobs(self, captured: dict[str, CapturedRows]) -> list[list[list[float]]]:
        """[token id, log probability] of the likeliest at each position, if they were asked for."""
        target = self._targets.get("logits")
        if target is None or not target[1].input_top_logprobs_num:
            return []
        return [[list(pair) for pair in entry.top] for entry in cast("list[TokenLogprobs]", captured.get("logits", []))]


def _positions(target: RequestTarget, token_ids: Sequence[int], param: str) -> list[int]:
    if target.slice_pos:
        return positions_of_slices(target.slice_pos, len(token_ids), f"{param}.slice_pos")
    return positions_of_tokens(target.token_id or (), token_ids)
