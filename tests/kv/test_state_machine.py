"""The KV cache manager under random use, against a model that knows what every slot contains.

The model is :class:`PagedMemory`: a hit on the wrong content, a block given away while somebody needs it, a window
that lacks a block and a write into a shared block all end in a digest that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.kv import KVCacheManager
from ksana.kv.prefix_cache import PrefixHit
from ksana.testing.paged_memory import PagedMemory, apply_table_update, make_kv_config, prefix_digests
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

LAYOUTS = ([None], [3], [5], [None, 4], [2, 7], [None, 3, 6], [1], [None, 1], [None, 17])


@dataclass
class Live:
    """A request with blocks, and what a worker would know of it."""

    request: Request
    tables: tuple[list[int], ...]
    planned: int = 0
    """Tokens that the step in preparation will compute."""
    repeats: bool = False
    """Is about to compute its parent's last token again."""


@dataclass
class Load:
    """A request that is loading: its table, and where the load begins and ends, in tokens."""

    request: Request
    tables: tuple[list[int], ...]
    start: int
    end: int


class Mirror:
    """What an observer knows of the cache's content."""

    def __init__(self, num_groups: int) -> None:
        self.hashes: list[set[bytes]] = [set() for _ in range(num_groups)]

    def blocks_stored(self, request: Request, group_id: int, first_index: int, block_hashes: Sequence[bytes]) -> None:
        assert request.block_hashes[first_index : first_index + len(block_hashes)] == list(block_hashes)
        assert not self.hashes[group_id] & set(block_hashes), "stored twice"
        self.hashes[group_id].update(block_hashes)

    def block_removed(self, group_id: int, block_hash: bytes) -> None:
        self.hashes[group_id].remove(block_hash)

    def all_blocks_cleared(self) -> None:
        for hashes in self.hashes:
            hashes.clear()


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        block_size=st.sampled_from([1, 4, 16]),
        num_blocks=st.integers(2, 24),
        num_window_blocks=st.integers(2, 24),
        caching=st.integers(0, 9).map(bool),
    )
    def create(
        self, layout: list[int | None], block_size: int, num_blocks: int, num_window_blocks: int, caching: bool
    ) -> None:
        config = make_kv_config(num_blocks, block_size, layout, num_window_blocks=num_window_blocks)
        self.windows = layout
        self.block_size = block_size
        self.mirror = Mirror(len(layout))
        self.kv = KVCacheManager(config, enable_prefix_caching=caching, observer=self.mirror)
        self.memory = PagedMemory(config)
        self.live: dict[str, Live] = {}
        self.preempted: list[Request] = []
        self.loads: dict[str, Load] = {}
        self.set_aside: dict[str, Load] = {}
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
            live.planned, live.repeats = 0, False
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
        # A child of one that has computed nothing itself would go back by two tokens, further than windows reach.
        repeats_last = repeats_last and computed > 0 and not parent.repeats
        child.num_computed_tokens = computed - repeats_last
        child.block_hashes = list(parent.request.block_hashes)
        tables = self.kv.fork(parent.request, child, computed)
        repeats = repeats_last or parent.repeats  # a child of a child goes back no further than the first one does
        self.live[child.request_id] = Live(child, tuple(list(table) for table in tables), repeats=repeats)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), preempt=st.booleans())
    def free(self, data: st.DataObject, preempt: bool) -> None:
        """Also one that is part of the step in preparation, whose copies nobody wants any more."""
        live = self.live[data.draw(st.sampled_from(sorted(self.live)), label="request")]
        if preempt:
            self._preempt(live)
        else:
            self._drop(live)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        assert len(self.kv.cached_hashes(0)) == 0

    # -- loads -------------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 64))
    def begin_load(self, data: st.DataObject, count: int) -> None:
        """Of a new request, or of one that was swapped out and wants its last, partly filled block too."""
        request = self._new_request([i % 3 % 2 for i in range(min(count, 4 * self.block_size + 6))], "")
        hit = self.kv.find_prefix(request)
        end = data.draw(st.integers(hit.num_tokens, request.num_tokens - 1), label="end")
        remote = self.kv.remote_loading
        prefix = remote.get_request_prefix_block_number_before_remote_cache_loading(request, hit)
        assert prefix.fa_block_num * self.block_size == hit.num_tokens
        wanted = -(-end // self.block_size) - prefix.fa_block_num
        tables = remote.allocate_blocks_for_remote_cache(request, wanted, remote.num_swa_blocks_for(end))
        if tables is None:
            remote.cancel(request)
        else:
            self.loads[request.request_id] = Load(request, tables, hit.num_tokens, end)

    @precondition(lambda self: getattr(self, "loads", None))
    @rule(data=st.data(), outcome=st.sampled_from(["all", "all", "some", "some", "none"]))
    def end_load(self, data: st.DataObject, outcome: str) -> None:
        """The transfer writes what it has, in whatever order, then the result is confirmed."""
        load = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads)), label="which"))
        request, size, remote = load.request, self.block_size, self.kv.remote_loading
        first, last = load.start // size, load.end // size
        matched, places = last, list(range(len(remote.remote_swa_blocks(request))))
        if outcome == "some":
            matched = data.draw(st.integers(first, last), label="matched")
            places = data.draw(st.lists(st.sampled_from(places), unique=True), label="windows") if places else []
        elif outcome == "none":
            matched, places = first, []
        arrived = {remote.remote_swa_blocks(request)[place] for place in places}
        self._transfer(load, matched, arrived, with_tail=outcome == "all")
        reserved = data.draw(st.integers(0, 3), label="reserved")
        usable = remote.confirm_remote_cache_loading_result(request, matched, places, reserved)
        assert usable == self._usable_end(load, matched, arrived) * size
        if outcome == "all" and reserved and usable == last * size:
            usable = load.end  # what was swapped out comes back with a last block that is not full
        request.num_computed_tokens = usable
        self.live[request.request_id] = live = Live(request, self.kv.block_ids(request.request_id))
        if usable:
            self.memory.check([[*table, 0] for table in live.tables], self._digests(request), usable, usable)

    @precondition(lambda self: getattr(self, "loads", None))
    @rule(data=st.data(), how=st.sampled_from(["cancel", "free", "set aside"]))
    def give_up_load(self, data: st.DataObject, how: str) -> None:
        load = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads)), label="which"))
        if how == "cancel":
            self.kv.remote_loading.cancel(load.request)
        elif how == "free":
            self.kv.free(load.request)
        else:
            self.set_aside[self.kv.remote_loading.set_aside(load.request)] = load
            self.preempted.append(load.request)

    @precondition(lambda self: getattr(self, "set_aside", None))
    @rule(data=st.data(), ends=st.booleans())
    def write_late(self, data: st.DataObject, ends: bool) -> None:
        """A transfer that nobody waits for spoils its blocks; nobody else must own one of them."""
        name = data.draw(st.sampled_from(sorted(self.set_aside)), label="which")
        load = self.set_aside[name]
        for group_id, table in enumerate(load.tables):
            for block_id in filter(None, table[load.start // self.block_size :]):
                self.memory.write_block(group_id, block_id, [-1] * self.block_size)
        if ends:
            del self.set_aside[name]
            self.kv.remote_loading.release(name)

    def _transfer(self, load: Load, matched: int, arrived: set[tuple[int, int]], *, with_tail: bool) -> None:
        size, digests = self.block_size, self._digests(load.request)
        for group_id, (window, table) in enumerate(zip(self.windows, load.tables, strict=True)):
            for index in range(load.start // size, len(table)):
                is_there = index < matched if window is None else (group_id, table[index]) in arrived
                if table[index] and (is_there or with_tail):
                    self.memory.write_block(group_id, table[index], digests[index * size : load.end][:size])

    def _usable_end(self, load: Load, matched: int, arrived: set[tuple[int, int]]) -> int:
        """By brute force: the last end before which each window has its blocks, here already or arrived."""
        first = load.start // self.block_size
        for end in range(matched, first, -1):
            for group_id, window in enumerate(self.windows):
                start = 0 if window is None else max(0, end - -(-window // self.block_size))
                needed = [load.tables[group_id][index] for index in range(max(start, first), end)]
                if window is not None and not all((group_id, block_id) in arrived for block_id in needed):
                    break
            else:
                return end
        return first

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        free = self._free_blocks()
        for group_id, group in enumerate(self.kv.config.groups):
            tables = [self.kv.block_ids(live.request.request_id)[group_id] for live in self.live.values()]
            tables += [load.tables[group_id] for load in (*self.loads.values(), *self.set_aside.values())]
            held = {block_id for table in tables for block_id in table} - {0}
            assert free[group_id] == group.num_blocks - 1 - len(held)

    @invariant()
    def observers_know_the_content(self) -> None:
        if hasattr(self, "kv"):
            assert [self.kv.cached_hashes(group) for group in range(len(self.windows))] == self.mirror.hashes

    def _free_blocks(self) -> list[int]:
        cache = self.kv._cache
        pools = [*([cache.pool] if cache.fa_group_id is not None else []), *cache.windows]
        return [pool.num_free_blocks for pool in pools]

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
        for load in self.loads.values():
            self.kv.free(load.request)
        for name in self.set_aside:
            self.kv.remote_loading.release(name)
        self.kv.check_integrity()
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
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
        fits = self._fits(hit, -(-(hit.num_tokens + count) // self.block_size) - len(hit.blocks))
        tables = self.kv.admit(request, hit, count)
        assert (tables is not None) == fits
        if tables is None:
            return False
        request.num_computed_tokens = hit.num_tokens
        self.live[request.request_id] = Live(request, tuple(list(table) for table in tables), planned=count)
        return True

    def _fits(self, hit: PrefixHit, missing: int) -> bool:
        """In each group the missing blocks, and those of the hit that nobody uses, are not more than the free ones."""
        free, windows = self._free_blocks(), self.kv._cache.windows
        unused = [sum(block.ref_cnt == 0 for block in hit.blocks)] if self.windows[0] is None else []
        for swa in windows:
            ends = hit.blocks[max(0, len(hit.blocks) - swa.window_blocks) :]
            unused.append(sum(not swa.is_used(block.block_id) for block in ends))
        return all(missing + count <= blocks for count, blocks in zip(unused, free, strict=True))

    def _check_hit(self, request: Request, hit: PrefixHit) -> None:
        """The hit is the longest that the index has, and leaves a token; what it holds is checked when it is used."""
        num_blocks = len(hit.blocks)
        assert hit.num_tokens == num_blocks * self.block_size < request.num_tokens
        if not self.kv.enable_prefix_caching:
            assert num_blocks == 0
            return
        usable = [n for n in range(1, (request.num_tokens - 1) // self.block_size + 1) if self._is_usable(request, n)]
        assert num_blocks == max(usable, default=0)

    def _is_usable(self, request: Request, num_blocks: int) -> bool:
        """The rule, by brute force: all full-attention blocks, and of each window the last W_blocks, no fewer."""
        hashes = request.block_hashes[:num_blocks]
        if any(self.kv._cache.pool.find(block_hash) is None for block_hash in hashes):
            return False
        for window, known in zip(self.windows, self.mirror.hashes, strict=True):
            wanted = num_blocks if window is None else -(-window // self.block_size)
            if wanted > num_blocks or not known.issuperset(hashes[num_blocks - wanted :]):
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
