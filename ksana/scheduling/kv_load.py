"""One load: which blocks of a request a KV connector fills, and which of them are good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from ksana.types.kv import cdiv
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockIds


@dataclass(slots=True)
class KVLoad:
    """The load of ``num_external_tokens`` tokens behind the first ``num_cached_tokens`` of a request.

    Attributes:
        status: what the request was before.
        block_ids: its block table, as the load began.
        started: by the scheduler's clock, seconds.
        tier: where the tokens come from.
        invalid: (KV cache group, block id) of those that did not come.
    """

    request: Request
    status: RequestStatus
    block_ids: BlockIds
    num_cached_tokens: int
    num_external_tokens: int
    block_size: int
    started: float
    tier: str
    invalid: set[tuple[int, int]] = field(default_factory=set)

    @property
    def end(self) -> int:
        """Tokens that the request has if all goes well."""
        return self.num_cached_tokens + self.num_external_tokens

    def note_invalid(self, invalid: Set[tuple[int, int]]) -> None:
        """Blocks of any load have failed: remember those of this one."""
        self.invalid.update(block for _, block in self._blocks() if block in invalid)

    def num_good_tokens(self, ignored_groups: Sequence[int] = ()) -> int:
        """Tokens, the cached ones included, up to the first block that did not come in another group."""
        bad = (
            index * self.block_size
            for index, block in self._blocks()
            if block in self.invalid and block[0] not in ignored_groups
        )
        return min(bad, default=self.end) if self.invalid else self.end

    def count_in_request(self, num_usable_tokens: int) -> None:
        """What the load brings counts as cached, unless it only gives back what the request had before."""
        request = self.request
        if self.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_usable_tokens
            request.num_external_tokens = max(0, num_usable_tokens - self.num_cached_tokens)
            request.external_tier = self.tier

    def _blocks(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(place in the table, (group, id)) of all blocks that are loaded."""
        first = self.num_cached_tokens // self.block_size
        last = cdiv(self.end, self.block_size)
        for group_id, ids in enumerate(self.block_ids):
            for index in range(first, min(last, len(ids))):
                if ids[index]:
                    yield index, (group_id, ids[index])
