"""A request before admission (:class:`RequestDraft`) and inside the engine (:class:`Request`)."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana.types.capture import Capture, CapturePlan
from ksana.types.output import FinishReason
from ksana.types.sampling import SamplingParams
from ksana.types.trace_context import current_trace_context

if TYPE_CHECKING:
    import numpy as np

    from ksana.scheduling.beam_group import BeamGroup
    from ksana.text.grammar import Grammar


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
    captures: tuple[Capture, ...] | CapturePlan = ()
    """What of the prompt is to be reported, or what says so once the prompt is tokenised, maybe on another thread; the
    results come in the same order in ``RequestOutput.captured``."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    final_only: bool = False
    """The consumer wants one output, at the end; on the way nobody is woken for it."""
    external_id: str = ""
    """The client's name for the request (``X-Request-Id``); need not be unique."""
    trace_context: str = field(default_factory=current_trace_context.get)
    """The ``traceparent`` (W3C) of the HTTP request that this one serves, empty if it has none."""


class RequestStatus(enum.IntEnum):
    """Where a request stands. Every value from ``FINISHED_STOPPED`` on is final."""

    WAITING_FOR_GRAMMAR = 0
    WAITING_FOR_PROMPT = 1
    WAITING = 2
    WAITING_FOR_REMOTE_KV = 3
    RUNNING = 4
    PREEMPTED = 5
    SWAPPED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH = 8
    FINISHED_ABORTED = 9
    FINISHED_ERROR = 10

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
        num_cached_tokens: of those, how many the first admission found in the prefix cache, or had loaded.
        num_external_tokens: of ``num_cached_tokens``, how many a KV connector has loaded.
        external_tier: where those lay: ``host``, ``disk``, ``remote``.
        kv_transfer_params: what a KV connector has to say to whoever sent the request, once that has ended.
        stop_token_ids: tokens that end the sequence, the model's own included.
        bad_words: token sequences that must not appear in the output.
        grammar: ``sampling.grammar``, once it is compiled; until then the request is no affair of the scheduler.
        captures: what of the prompt is to be reported: the draft's, and behind them that of ``prompt_logprobs``.
        max_cached_tokens: tokens that may be taken from the prefix cache: what is captured must be computed.
        max_total_tokens: prompt plus output never exceeds this.
        max_computed_tokens: the model never sees more: what is sampled last needs no successor.
        stop_reason: the stop token that ended it, if it was none of the model's own.
        first_scheduled_time: when it first got blocks, by the scheduler's clock.
        trace_context: the ``traceparent`` of whoever sent it, or empty.
        leader: the sequence that computes the prompt for this one too; None once it has, or if this one does it.
        followers: sequences of the same prompt that wait until this one has computed it, or searched for them too.
        beam_group: the beam search that this request stands for.
        score: of the beam that became its output.
        block_hashes: content hash of every full block of ``all_token_ids`` so far.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_order",
        "arrival_time",
        "bad_words",
        "beam_group",
        "block_hashes",
        "cache_salt",
        "captures",
        "embeddings",
        "eos_token_ids",
        "error",
        "external_tier",
        "final_only",
        "first_scheduled_time",
        "followers",
        "grammar",
        "kv_transfer_params",
        "leader",
        "max_cached_tokens",
        "max_computed_tokens",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling",
        "score",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "trace_context",
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
        bad_words: tuple[tuple[int, ...], ...] = (),
        captures: tuple[Capture, ...] = (),
        cache_salt: str = "",
        priority: int = 0,
        final_only: bool = False,
        arrival_time: float | None = None,
        trace_context: str = "",
    ) -> None:
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.max_computed_tokens = max(max_total_tokens - 1, self.num_prompt_tokens)
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(sampling.stop_token_ids)
        self.bad_words = bad_words
        self.embeddings = embeddings
        self.captures = captures
        first_captured = [capture.positions[0] for capture in captures if len(capture.positions)]
        self.max_cached_tokens = min(first_captured, default=max_total_tokens)
        self.cache_salt = cache_salt
        self.priority = priority
        self.final_only = final_only
        self.trace_context = trace_context
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.arrival_order = 0  # set by the scheduler
        self.leader: Request | None = None
        self.followers: list[Request] = []
        self.beam_group: BeamGroup | None = None  # set by the scheduler
        self.score: float | None = None
        self.grammar: Grammar | None = None
        self.status = RequestStatus.WAITING if sampling.grammar is None else RequestStatus.WAITING_FOR_GRAMMAR
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        self.external_tier = ""
        self.kv_transfer_params: dict[str, Any] | None = None
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.stop_reason: int | None = None
        self.first_scheduled_time: float | None = None
        self.error: RequestError | None = None

    def set_grammar(self, grammar: Grammar) -> None:
        """The grammar is compiled: the request may be queued."""
        for sequence in self.sequences:
            sequence.grammar = grammar
        self.status = RequestStatus.WAITING

    def lead(self, followers: list[Request]) -> None:
        """Let ``followers``, sequences of the same prompt, wait for this one to compute it."""
        self.leader = None
        self.followers = followers
        for follower in followers:
            follower.leader = self
            follower.status = RequestStatus.WAITING_FOR_PROMPT

    def forget_captures(self) -> None:
        """What was to be captured has been: nothing of the prompt need be computed again for that."""
        self.captures = ()
        self.max_cached_tokens = self.max_total_tokens

    @property
    def sequences(self) -> list[Request]:
        """This one, and those that wait for its prompt."""
        return [self, *self.followers]

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
