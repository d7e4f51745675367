"""A request before admission (:class:`RequestDraft`) and inside the engine (:class:`Request`)."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana.types.output import FinishReason
from ksana.types.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class InputEmbedding:
    """Rows that replace the embeddings of the prompt tokens from ``position`` on (an image, an audio clip).

    Attributes:
        position: index of the first replaced prompt token.
        rows: float array of shape [n, hidden_size].
    """

    position: int
    rows: np.ndarray


@dataclass(slots=True)
class RequestDraft:
    """What a frontend hands to the engine, and what preprocess hooks may edit in place.

    Exactly one of ``prompt``, ``prompt_token_ids`` and ``messages`` must be set once the hooks have run. ``messages``
    are rendered with the model's chat template.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    embeddings: list[InputEmbedding] = field(default_factory=list)
    additional_params: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    final_only: bool = False
    """The consumer wants one output, at the end; on the way nobody is woken for it."""
    external_id: str = ""
    """The client's name for the request (``X-Request-Id``); need not be unique."""


class RequestStatus(enum.IntEnum):
    """Where a request stands. Every value from ``FINISHED_STOPPED`` on is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        """True for the final states."""
        return self >= RequestStatus.FINISHED_STOPPED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """A validated request inside the engine. The scheduler alone changes it.

    ``num_computed_tokens`` chases ``num_tokens``: prefill, a chunk of it, decode, a prefix hit and the resumption after
    a preemption are all the same thing at different distances.

    Attributes:
        request_id: unique over the life of the engine.
        all_token_ids: prompt and generated tokens.
        num_computed_tokens: tokens whose keys and values are known to be in the cache.
        num_in_flight: tokens after those that scheduled steps, whose output is not there yet, compute. They may reach
            beyond ``all_token_ids``: such a token is a placeholder for the one that an earlier step in flight samples.
        num_cached_tokens: of those, how many the first admission found in the prefix cache.
        stop_token_ids: tokens that end the sequence, the model's own included.
        max_total_tokens: prompt plus output never exceeds this.
        stop_reason: the stop token that ended it, if it was none of the model's own.
        first_scheduled_time: when it first got blocks, by the scheduler's clock.
        block_hashes: content hash of every full block of ``all_token_ids`` so far.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_order",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "embeddings",
        "eos_token_ids",
        "error",
        "final_only",
        "first_scheduled_time",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_total_tokens: int,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        embeddings: tuple[InputEmbedding, ...] = (),
        cache_salt: str = "",
        priority: int = 0,
        final_only: bool = False,
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(sampling.stop_token_ids)
        self.embeddings = embeddings
        self.cache_salt = cache_salt
        self.priority = priority
        self.final_only = final_only
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.arrival_order = 0  # set by the scheduler
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.stop_reason: int | None = None
        self.first_scheduled_time: float | None = None
        self.error: RequestError | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens, a copy."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
