"""A stand-in for the cache tensors that remembers what was written where, and an executor that computes with it.

Every slot holds a digest of the token prefix that was written there. A block table that is wrong, a block that was
given away too early, a prefix hit on other content and a write into a shared block all show as a wrong digest, without
a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ksana.types.kv import BlockCopy, FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from ksana.types.step import BeamCandidates, BlockTableUpdate, ModelRunnerOutput, NewRequestData, SchedulerOutput

_MASK = 2**64 - 1
_LOGICAL_BLOCKS = 1000


def make_kv_config(
    num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), *, num_window_blocks: int = 0
) -> KVCacheConfig:
    """A cache with one layer, and group, per window; None, which is full attention, comes first.

    Args:
        num_blocks: usable blocks of the first group; the null block comes on top.
        num_window_blocks: usable blocks of each sliding window beside full attention; 0: as many as of that.
    """
    groups = []
    for layer, window in enumerate(windows):
        spec: KVCacheSpec
        if window is None:
            spec = FullAttentionSpec(block_size, 1, 8, "float32")
        else:
            spec = SlidingWindowSpec(block_size, 1, 8, "float32", window)
        usable = num_blocks if window is None or windows[0] is not None else num_window_blocks or num_blocks
        groups.append(KVCacheGroup(spec, (layer,), usable + 1))
    return KVCacheConfig(tuple(groups), num_logical_blocks=_LOGICAL_BLOCKS)


def prefix_digests(tokens: Sequence[int], salt: int = 0) -> list[int]:
    """For each token a number that stands for it and everything before it."""
    digests, state = [], salt
    for token in tokens:
        state = hash((state, token)) & _MASK
        digests.append(state)
    return digests


def beam_scores(digest: int, vocab_size: int) -> list[float]:
    """For each token something like its log probability, behind the prefix that ``digest`` stands for."""
    return [-1.0 - hash((digest, token)) % 7919 / 2000 for token in range(vocab_size)]


class PagedMemory:
    """The content of every slot of every block.

    Args:
        config: its groups say which positions a token looks at.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self._config = config
        self._slots: dict[tuple[int, int, int], int] = {}

    def write(self, tables: Sequence[list[int]], digests: list[int], start: int, end: int) -> None:
        """Write positions ``start`` to before ``end`` of a request into its blocks, in every group."""
        size = self._config.block_size
        for group_id, table in enumerate(tables):
            for position in range(start, end):
                block_id = table[position // size]
                assert block_id != 0, f"group {group_id}: position {position} is written to the null block"
                self._slots[group_id, block_id, position % size] = digests[position]

    def check(self, tables: Sequence[list[int]], digests: list[int], start: int, end: int) -> None:
        """Everything that the queries at ``start`` to before ``end`` look at, before ``end``, is as it was written.

        Raises:
            AssertionError: naming the group and the position.
        """
        size = self._config.block_size
        for group_id, (group, table) in enumerate(zip(self._config.groups, tables, strict=True)):
            window = group.sliding_window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                block_id = table[position // size]
                assert block_id != 0, f"group {group_id}: position {position} is needed, but its block was dropped"
                held = self._slots.get((group_id, block_id, position % size))
                assert held == digests[position], (
                    f"group {group_id}, position {position}: block {block_id} holds {held or 'nothing'}"
                )

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._config.block_size

    def read_block(self, group_id: int, block_id: int) -> list[int | None]:
        """The content of a block's slots; None where nothing has been written."""
        return [self._slots.get((group_id, block_id, offset)) for offset in range(self.block_size)]

    def write_block(self, group_id: int, block_id: int, content: Sequence[int | None]) -> None:
        """Overwrite a whole block."""
        for offset, digest in enumerate(content):
            if digest is None:
                self._slots.pop((group_id, block_id, offset), None)
            else:
                self._slots[group_id, block_id, offset] = digest

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy whole blocks, all at once."""
        size = self._config.block_size
        destinations = {(group_id, destination) for group_id, _, destination in copies}
        assert len(destinations) == len(copies), f"two copies go to one block: {copies}"
        found = [
            ((group_id, destination, offset), self._slots.get((group_id, source, offset)))
            for group_id, source, destination in copies
            for offset in range(size)
        ]
        for slot, content in found:
            if content is None:
                self._slots.pop(slot, None)
            else:
                self._slots[slot] = content


def apply_table_update(tables: Sequence[list[int]], update: BlockTableUpdate) -> None:
    """What a worker does with an update: replace the tail of each table from ``first_index`` on."""
    for table, block_ids in zip(tables, update.block_ids, strict=True):
        table[update.first_index : update.first_index + len(block_ids)] = block_ids


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    num_computed: int
    tables: tuple[list[int], ...]
    salt: int
    num_candidates: int


class PagedMemoryExecutor:
    """An executor without a model: the next token is a function of all tokens before it, read back from the cache.

    It keeps rows as a real worker does, from the scheduler's deltas alone, and fails on the first slot that does not
    hold what a request needs.

    Args:
        config: of the cache.
        vocab_size: tokens are from 0 to before this.
    """

    def __init__(self, config: KVCacheConfig, vocab_size: int = 50) -> None:
        self.memory = PagedMemory(config)
        self._vocab_size = vocab_size
        self._rows: dict[str, _Row] = {}

    @property
    def request_ids(self) -> set[str]:
        """The rows held now."""
        return set(self._rows)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The whole step; raises AssertionError where the cache or the deltas are wrong."""
        self.memory.copy(step.block_copies)
        return self.compute(step)

    def compute(self, step: SchedulerOutput, spoilt: Collection[str] = ()) -> ModelRunnerOutput:
        """The step behind its block copies.

        Args:
            spoilt: requests whose context is known to be damaged: they draw another token than they should.
        """
        self._apply_changes(step)
        spans = {}
        for request_id, count in step.num_scheduled_tokens.items():
            row, drafts = self._rows[request_id], step.draft_token_ids.get(request_id, [])
            start, row.num_computed = row.num_computed, row.num_computed + count
            assert count > 0, f"{request_id}: no token to compute"
            last = len(row.tokens) + len(drafts)
            assert row.num_computed <= last, f"{request_id}: more tokens scheduled than there are"
            assert not drafts or row.num_computed == last, f"{request_id}: drafts without what they follow"
            spans[request_id] = (row, prefix_digests([*row.tokens, *drafts], row.salt), start, drafts)
        for row, digests, start, _ in spans.values():
            self.memory.write(row.tables, digests, start, row.num_computed)
        output = ModelRunnerOutput()
        for request_id, (row, digests, start, drafts) in spans.items():
            if request_id in spoilt:
                digests = [digest + 1 for digest in digests]
            else:
                self.memory.check(row.tables, digests, start, row.num_computed)
            if row.num_computed == len(digests) and row.num_candidates:
                output.candidates[request_id] = self._rank(row, digests[-1])
            elif row.num_computed == len(digests):
                output.sampled_token_ids[request_id] = self._sample(row, digests, drafts)
        return output

    def _sample(self, row: _Row, digests: list[int], drafts: list[int]) -> list[int]:
        """Append the drafts that are right, and one token more."""
        drawn = [digest % self._vocab_size for digest in digests[len(row.tokens) - 1 :]]
        wrong = (place for place, draft in enumerate(drafts) if draft != drawn[place])
        tokens = drawn[: next(wrong, len(drafts)) + 1]
        row.tokens += tokens
        row.num_computed = len(row.tokens) - 1
        return tokens

    def _rank(self, row: _Row, digest: int) -> BeamCandidates:
        """The likeliest tokens behind a beam."""
        scores = beam_scores(digest, self._vocab_size)
        best = sorted(range(self._vocab_size), key=lambda token: -scores[token])[: row.num_candidates]
        return BeamCandidates(best, [scores[token] for token in best])

    def reset(self) -> None:
        """Forget all rows."""
        self._rows.clear()

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for request_id in step.removed_request_ids:
            self._rows.pop(request_id, None)
        for request in step.new_requests:
            assert request.request_id not in self._rows, f"{request.request_id} was added twice"
            self._rows[request.request_id] = _new_row(request)
        for request_id, tokens in step.chosen_token_ids.items():
            self._rows[request_id].tokens += tokens
        for request in step.new_beams:
            self._rows[request.request_id] = _new_row(request)
        for request_id, update in step.block_table_updates.items():
            apply_table_update(self._rows[request_id].tables, update)


def _new_row(request: NewRequestData) -> _Row:
    tables = tuple(list(block_ids) for block_ids in request.block_ids)
    salt = hash(tuple((e.position, e.rows.tobytes()) for e in request.embeddings)) if request.embeddings else 0
    num_beams = request.sampling.num_beams
    num_candidates = num_beams + len(request.stop_token_ids) if num_beams > 1 else 0
    return _Row(list(request.token_ids), request.num_computed_tokens, tables, salt, num_candidates)
