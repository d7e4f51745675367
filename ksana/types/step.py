"""What the scheduler tells the worker to do in one step, and what the worker answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ksana.types.output import TokenLogprobs
from ksana.types.request import InputEmbedding, Request
from ksana.types.sampling import SamplingParams

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
    embeddings: tuple[InputEmbedding, ...] = ()

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
            embeddings=request.embeddings,
        )


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_scheduled_tokens: tokens to compute per request, in batch order.
        new_requests: requests to add before the step.
        block_table_updates: by request, only for running requests whose table has changed.
        removed_request_ids: rows to drop before the step: finished or preempted since the last one.
        block_copies: (source, destination) blocks to copy before anything is written (copy-on-write).
        number: counts the steps of an engine.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequestData] = field(default_factory=list)
    block_table_updates: dict[str, BlockTableUpdate] = field(default_factory=dict)
    removed_request_ids: list[str] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    number: int = 0

    @property
    def is_empty(self) -> bool:
        """True if the worker has nothing to do."""
        return not (self.num_scheduled_tokens or self.removed_request_ids or self.block_copies)


@dataclass(slots=True)
class ModelRunnerOutput:
    """Result of a step.

    Attributes:
        sampled_token_ids: by request; one in the middle of its prefill has no entry.
        logprobs: by request, for those that asked; as many as sampled tokens.
        broken_request_ids: requests whose logits were not finite numbers; they cannot go on.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    broken_request_ids: list[str] = field(default_factory=list)
