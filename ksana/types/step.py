"""What the scheduler tells the worker to do in one step, and what the worker answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ksana.types.capture import Capture, CapturedPart
from ksana.types.kv import BlockCopy
from ksana.types.kv_transfer import ConnectorMetadata, KVConnectorOutput
from ksana.types.output import TokenLogprobs
from ksana.types.request import InputEmbedding, Request
from ksana.types.sampling import SamplingParams

if TYPE_CHECKING:
    from ksana.text.grammar import Grammar

BlockIds = tuple[list[int], ...]
"""Block ids of a request, one list per KV cache group."""


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Entries of a block table from ``first_index`` on, per group; what stood there before is replaced."""

    first_index: int
    block_ids: BlockIds

    @property
    def is_empty(self) -> bool:
        """True if the table is as it was."""
        return not any(self.block_ids)


@dataclass(slots=True)
class NewRequestData:
    """A request that the worker has no row for: admitted for the first time, or again after a preemption."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: BlockIds
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    embeddings: tuple[InputEmbedding, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    captures: tuple[Capture, ...] = ()

    @classmethod
    def of(cls, request: Request, block_ids: BlockIds) -> NewRequestData:
        """Describe ``request`` as it stands now."""
        return cls(
            request_id=request.request_id,
            token_ids=list(request.all_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling=request.sampling,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            embeddings=request.embeddings,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words,
            grammar=request.grammar,
            captures=request.captures,
        )


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_scheduled_tokens: tokens to compute per request, in batch order.
        new_requests: requests to add before the step.
        new_beams: beams that branch off, to add before the step. One that has a row already gets another.
        chosen_token_ids: by beam, tokens that go behind its known ones before the step.
        block_table_updates: by request, only for running requests whose table has changed.
        removed_request_ids: rows to drop before the step: finished or preempted since the last one.
        block_copies: blocks to copy before anything is written (copy-on-write).
        draft_token_ids: by request, tokens guessed to follow its known ones. They are computed in this step too, and
            count among ``num_scheduled_tokens``; those that the model would not have drawn are computed again.
        connector_metadata: what the KV connector's scheduler side tells its worker side.
        polls_connector: the worker shall say what has been transferred, though there may be nothing to compute.
        number: counts the steps of an engine.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_beams: list[NewRequestData] = field(default_factory=list)
    chosen_token_ids: dict[str, list[int]] = field(default_factory=dict)
    block_table_updates: dict[str, BlockTableUpdate] = field(default_factory=dict)
    removed_request_ids: list[str] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    connector_metadata: ConnectorMetadata | None = None
    polls_connector: bool = False
    number: int = 0

    @property
    def is_empty(self) -> bool:
        """True if the worker has nothing to do."""
        return self.only_transfers and self.connector_metadata is None and not self.polls_connector

    @property
    def only_transfers(self) -> bool:
        """True if the worker has nothing to do but for the KV connector."""
        return not (self.num_scheduled_tokens or self.removed_request_ids or self.block_copies)


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """What may follow a beam, the likeliest first; nothing that is banned.

    Attributes:
        token_ids: enough that ``num_beams`` of them do not end a text, unless there are no more.
        scores: log probabilities, changed by the processors of the request.
        logprobs: what is reported for each if it is chosen; empty if that was not asked for.
    """

    token_ids: list[int]
    scores: list[float]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ModelRunnerOutput:
    """Result of a step.

    Attributes:
        sampled_token_ids: by request, accepted drafts and one token more; one in the middle of its prefill has no
            entry.
        candidates: by beam, in place of a sampled token.
        logprobs: by request, for those that asked; as many as sampled tokens.
        broken_request_ids: requests whose logits were not finite numbers; they cannot go on.
        banned_request_ids: requests whose every token is banned; they cannot go on.
        captured: by request, what of its captures fell into the step.
        kv_connector_output: what the KV connector's worker side has found done; None if there is no connector.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    candidates: dict[str, BeamCandidates] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    broken_request_ids: list[str] = field(default_factory=list)
    banned_request_ids: list[str] = field(default_factory=list)
    captured: dict[str, list[CapturedPart]] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None

    def discard(self, request_id: str) -> None:
        """Take out all that was computed for a request that has one row."""
        by_request: tuple[dict[str, Any], ...] = (self.sampled_token_ids, self.logprobs, self.captured)
        for results in by_request:
            results.pop(request_id, None)
        for ids in (self.broken_request_ids, self.banned_request_ids):
            if request_id in ids:
                ids.remove(request_id)
