"""What a request wants to know of its prompt beside the text that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Union

from ksana.types.output import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np

CaptureKind = Literal["hidden", "normed", "mean", "logits", "logprobs"]

CapturedRows = Union["np.ndarray", "list[TokenLogprobs]"]
"""float32 [n, hidden_size] or [n, vocab_size], or n log probabilities; of ``mean`` a single row."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows at positions of the prompt.

    Attributes:
        kind: ``hidden`` states after the last layer, ``normed`` ones after the final norm, the ``mean`` of the normed
            ones over all positions, ``logits``, or ``logprobs`` of the prompt token that follows each position (behind
            the last one, of token 0).
        positions: at least one, ascending, each once.
        top: for ``logprobs``, how many of the likeliest tokens to report beside the one that follows.
    """

    kind: CaptureKind
    positions: Sequence[int]
    top: int = 0


CapturePlan = Callable[[Sequence[int]], Sequence[Capture]]
"""Says what is to be captured of a prompt, once its token ids are known. May raise RequestError."""


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """Rows that a step has computed.

    Attributes:
        capture: index among the request's captures.
        first: index of the first row among the capture's positions; the others follow.
        rows: for ``mean``, their sum, float64 [1, hidden_size].
    """

    capture: int
    first: int
    rows: CapturedRows
