"""What was seen of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CountSource = Literal["ids", "usage", "chunks"]
"""Where a number of generated tokens comes from. ``ids`` and ``usage`` are exact; ``chunks`` is a lower bound."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete answer.

    Attributes:
        kind: what failures are counted by: ``HTTP 503``, ``stalled``, ``connection refused``.
        detail: the words of the server or of the network, cut to a readable length.
    """

    kind: str
    detail: str = ""


@dataclass(slots=True)
class RequestRecord:
    """One request and its answer. Times are in seconds of :func:`time.perf_counter`.

    Attributes:
        index: place in the workload.
        sent_s: just before the request was handed to the network, connecting included.
        chunk_times: when each piece of the answer arrived that carried tokens.
        prompt_tokens: as the server counts, or as sent where that is known; None otherwise.
        cached_tokens: prompt tokens that the server did not have to compute, if it tells.
        failure: None for a complete answer.
    """

    index: int
    sent_s: float
    end_s: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    prompt_chars: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    count_source: CountSource = "chunks"
    text: str = ""
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def latency_s(self) -> float:
        """From sending to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first piece with tokens."""
        return self.chunk_times[0] - self.sent_s if self.chunk_times else None

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece with tokens and the next."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two."""
        if self.output_tokens < 2 or not self.chunk_times:
            return None
        return (self.end_s - self.chunk_times[0]) / (self.output_tokens - 1)
