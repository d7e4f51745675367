"""The KV cache manager under random use, against a model that knows what every slot contains.

The model is :class:`PagedMemory`: a hit on the wrong content, a block given away while somebody needs it, a window
that lacks a block and a write into a shared block all end in a digest that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.kv import KVCacheManager
from ksana.kv.manager import PrefixHit
from ksana.testing.paged_memory import PagedMemory, apply_table_update, make_kv_config, prefix_digests
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

LAYOUTS = ([None], [3], [5], [None, 4], [2, 7], [None, 3, 6], [1], [None, 17])


@dataclass
class Live:
    """A request with blocks, and what a worker would know of it."""

    request: Request
    tables: tuple[list[int], ...]
    planned: int = 0
    """Tokens that the step in preparation will compute."""


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        block_size=st.sampled_from([1, 4, 16]),
        num_blocks=st.integers(2, 24),
        caching=st.integers(0, 9).map(bool),
    )
    def create(self, layout: list[int | None], block_size: int, num_blocks: int, caching: bool) -> None:
        config = make_kv_config(num_blocks, block_size, layout)
        self.windows = layout
        self.block_size = block_size
        self.kv = KVCacheManager(config, enable_prefix_caching=caching)
        self.memory = PagedMemory(config)
        self.live: dict[str, Live] = {}
        self.preempted: list[Request] = []
        self.arrived = 0

    # -- what happens to requests --------------------------------------------------------------------------------

    @rule(data=st.data(), salt=st.sampled_from(["", "", "", "other"]))
    def arrive(self, data: st.DataObject, salt: str) -> None:
        longest = min(64, 4 * self.block_size + 6)
        length = data.draw(st.integers(1, longest), label="prompt length")
        # Mostly a cut of one long prompt: prefixes that diverge early would almost never hit.
        tokens = [i % 3 % 2 for i in range(length)]
        for position in data.draw(st.lists(st.integers(0, length - 1), max_size=2), label="flipped tokens"):
            tokens[position] = 1
        self._admit(data, self._new_request(tokens, salt))

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def return_from_preemption(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.preempted) - 1), label="which")
        request = self.preempted.pop(index)
        if not self._admit(data, request):
            self.preempted.append(request)

    @precondition(lambda self: self._idle())
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """Grow a request, as the scheduler does before a step; without room it is preempted."""
        live = data.draw(st.sampled_from(self._idle()), label="request")
        request = live.request
        remaining = request.num_tokens - request.num_computed_tokens
        if remaining == 0:
            self._append(request, data.draw(st.integers(0, 1), label="token"))
            remaining = 1
        count = data.draw(st.integers(1, remaining), label="count")
        update = self.kv.grow(request, count)
        if update is None:
            self._preempt(live)
            return
        apply_table_update(live.tables, update)
        live.planned = count

    @rule()
    def compute(self) -> None:
        """The step: copies, then all writes, then all reads, then the commits."""
        self.memory.copy(self.kv.take_block_copies())
        planned = [live for live in self.live.values() if live.planned]
        for live in planned:
            start = live.request.num_computed_tokens
            self.memory.write(live.tables, self._digests(live.request), start, start + live.planned)
        for live in planned:
            start = live.request.num_computed_tokens
            self.memory.check(live.tables, self._digests(live.request), start, start + live.planned)
            live.request.num_computed_tokens += live.planned
            live.planned = 0
        for live in planned:
            self.kv.commit(live.request)
        # Nobody's block has been written to by anybody else, whether or not it was part of the step.
        for live in self.live.values():
            done = live.request.num_computed_tokens
            self.memory.check(live.tables, self._digests(live.request), done, done)

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), repeats_last=st.booleans())
    def fork(self, data: st.DataObject, repeats_last: bool) -> None:
        parent = data.draw(st.sampled_from(self._idle()), label="parent")
        child = self._new_request(parent.request.all_token_ids, parent.request.cache_salt)
        computed = parent.request.num_computed_tokens
        child.num_computed_tokens = computed - 1 if repeats_last and computed else computed
        child.block_hashes = list(parent.request.block_hashes)
        tables = self.kv.fork(parent.request, child, computed)
        self.live[child.request_id] = Live(child, tuple(list(table) for table in tables))

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), preempt=st.booleans())
    def free(self, data: st.DataObject, preempt: bool) -> None:
        live = data.draw(st.sampled_from(self._idle()), label="request")
        if preempt:
            self._preempt(live)
        else:
            self._drop(live)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        assert self.kv.pool.num_cached_blocks == 0

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        held = {
            block
            for live in self.live.values()
            for table in self.kv.block_ids(live.request.request_id)
            for block in table
        }
        held.discard(0)
        assert self.kv.num_free_blocks == self.kv.pool.num_usable_blocks - len(held)

    @invariant()
    def workers_see_the_same_tables(self) -> None:
        """Up to the holes that a window has left, which a worker is not told about."""
        for live in getattr(self, "live", {}).values():
            for seen, real in zip(live.tables, self.kv.block_ids(live.request.request_id), strict=True):
                assert len(seen) == len(real)
                assert all(b in (0, a) for a, b in zip(seen, real, strict=True))

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.compute()
        for live in list(self.live.values()):
            self._drop(live)
        self.kv.check_integrity()
        assert self.kv.num_free_blocks == self.kv.pool.num_usable_blocks
        assert self.kv.usage == 0.0

    # -- parts ---------------------------------------------------------------------------------------------------

    def _idle(self) -> list[Live]:
        return [live for live in getattr(self, "live", {}).values() if not live.planned]

    def _new_request(self, tokens: list[int], salt: str) -> Request:
        self.arrived += 1
        return Request(f"r{self.arrived}", tokens, SamplingParams(), max_total_tokens=10_000, cache_salt=salt)

    def _digests(self, request: Request) -> list[int]:
        return prefix_digests(request.all_token_ids, 1 if request.cache_salt else 0)

    def _append(self, request: Request, token: int) -> None:
        request.all_token_ids.append(token)

    def _admit(self, data: st.DataObject, request: Request) -> bool:
        hit = self.kv.find_prefix(request)
        self._check_hit(request, hit)
        count = data.draw(st.integers(1, request.num_tokens - hit.num_tokens), label="first chunk")
        missing = -(-(hit.num_tokens + count) // self.block_size) - hit.num_tokens // self.block_size
        revived = sum(block.ref_cnt == 0 and block.block_id != 0 for blocks in hit.blocks for block in blocks)
        fits = missing * len(self.windows) + revived <= self.kv.num_free_blocks
        tables = self.kv.admit(request, hit, count)
        assert (tables is not None) == fits
        if tables is None:
            return False
        request.num_computed_tokens = hit.num_tokens
        self.live[request.request_id] = Live(request, tuple(list(table) for table in tables), planned=count)
        return True

    def _check_hit(self, request: Request, hit: PrefixHit) -> None:
        """The hit is the longest that the index has, leaves a token, and holds what the next tokens will look at."""
        assert hit.num_tokens % self.block_size == 0
        assert hit.num_tokens < request.num_tokens
        num_blocks = hit.num_tokens // self.block_size
        assert [len(blocks) for blocks in hit.blocks] == [num_blocks] * len(self.windows)
        digests = self._digests(request)
        tables = [[block.block_id for block in blocks] for blocks in hit.blocks]
        if num_blocks:
            self.memory.check([[*table, 0] for table in tables], digests, hit.num_tokens, hit.num_tokens)
        if not self.kv.enable_prefix_caching:
            assert num_blocks == 0
            return
        for longer in range(num_blocks + 1, (request.num_tokens - 1) // self.block_size + 1):
            assert not self._is_usable(request.block_hashes, longer), f"a hit of {longer} blocks was missed"

    def _is_usable(self, hashes: list[bytes], num_blocks: int) -> bool:
        for group_id, window in enumerate(self.windows):
            first = 0 if window is None else max(0, num_blocks * self.block_size - window + 1) // self.block_size
            if any(self.kv.pool.find((hashes[i], group_id)) is None for i in range(first, num_blocks)):
                return False
        return True

    def _preempt(self, live: Live) -> None:
        self._drop(live)
        live.request.num_computed_tokens = 0
        self.preempted.append(live.request)

    def _drop(self, live: Live) -> None:
        self.kv.free(live.request)
        del self.live[live.request.request_id]


TestKVCache = KVCacheMachine.TestCase
