"""What the engine gives back, step by step and at the end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError

if TYPE_CHECKING:
    from ksana.types.capture import CapturedRows


class FinishReason(str, enum.Enum):
    """Why a sequence ended. The value is what APIs report."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position of the output.

    Attributes:
        token_id, logprob: the token that was generated.
        top: (token id, log probability) of the likeliest, in descending order; may or may not hold the generated one.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def as_pairs(self) -> list[list[float]]:
        """[token id, log probability] of the generated token and then of the other likeliest: the native API's form."""
        others = (pair for pair in self.top if pair[0] != self.token_id)
        return [[self.token_id, self.logprob], *map(list, others)]


@dataclass(slots=True)
class RequestStats:
    """Times of one request, in seconds of ``time.monotonic``, and its counts of tokens."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """News about one request since the last one that its consumer took.

    Attributes:
        request_id: the engine's own id, unique over its life.
        prompt_token_ids: the prompt as the engine ran it, special tokens included.
        text_delta: new text, safe to send: never half a character, never the start of a stop string.
        token_ids_delta: new tokens. Text may trail tokens by the few that are held back.
        text: everything so far.
        token_ids: everything so far. The list, like ``logprobs``, is one for the whole stream and grows with it.
        logprobs: one entry for each of ``token_ids`` if they were asked for, else empty.
        prompt_logprobs: one entry for each of ``prompt_token_ids`` if they were asked for, else empty; None for the
            first, which nothing precedes. Complete from the first output on.
        captured: one result for each of the draft's captures, complete from the first output on.
        finish_reason: set in the last output of a request, and only there.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token.
        score: of a beam, its log probability divided by a power of its length; set in the last output.
        error: what went wrong, for ``FinishReason.ERROR``.
        extra: results of postprocess plugins, JSON values by name; the native API sends them along.
    """

    request_id: str
    prompt_token_ids: list[int]
    text_delta: str = ""
    token_ids_delta: list[int] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    captured: list[CapturedRows] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    error: RequestError | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def finished(self) -> bool:
        """True for the last output of a request."""
        return self.finish_reason is not None
