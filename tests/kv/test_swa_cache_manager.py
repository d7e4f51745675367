"""The blocks of one sliding window: who gets which, and what is evicted for whom."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ksana.kv import SWACacheManager


def cached(swa: SWACacheManager, fa_block_id: int, prefix: int, hits: int = 0) -> int:
    """A block that is full, findable and used by nobody."""
    block_id = swa.allocate(fa_block_id, prefix)
    assert swa.fix_content(fa_block_id)
    for _ in range(hits):
        swa.increment_hit_count(fa_block_id)
    swa.set_reclaimable(fa_block_id, True)
    return block_id


def test_idle_blocks_go_before_any_is_evicted() -> None:
    swa = SWACacheManager(2, 4)
    cached(swa, 11, 0)
    cached(swa, 12, 1)
    swa.allocate(13, 2)
    assert swa.is_valid(11)
    assert swa.is_valid(12)
    assert swa.num_free_blocks == 2
    swa.allocate(14, 3)
    assert not swa.is_valid(11)
    assert swa.is_valid(12)


def test_null_block_is_never_handed_out() -> None:
    swa = SWACacheManager(1, 4)
    assert sorted(swa.allocate(fa_block, 0) for fa_block in (7, 8, 9)) == [1, 2, 3]
    with pytest.raises(IndexError, match="no idle or reclaimable block"):
        swa.allocate(10, 0)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        SWACacheManager(1, 1)


def test_fewest_hits_go_first_whatever_their_place() -> None:
    swa = SWACacheManager(2, 4)
    cached(swa, 1, prefix=0, hits=1)
    cached(swa, 2, prefix=9)
    cached(swa, 3, prefix=1, hits=2)
    assert order_of_eviction(swa, 3) == [2, 1, 3]


def test_of_equal_hits_the_smallest_prefix_goes_first() -> None:
    swa = SWACacheManager(2, 4)
    for fa_block, prefix in ((1, 5), (2, 3), (3, 4)):
        cached(swa, fa_block, prefix, hits=1)
    assert order_of_eviction(swa, 3) == [2, 3, 1]


def test_of_equal_worth_the_longest_reclaimable_goes_first() -> None:
    swa = SWACacheManager(2, 4)
    for fa_block in (1, 2, 3):
        cached(swa, fa_block, 0)
    swa.set_reclaimable(1, False)
    swa.set_reclaimable(1, True)
    assert order_of_eviction(swa, 3) == [2, 3, 1]


def order_of_eviction(swa: SWACacheManager, count: int) -> list[int]:
    evicted: list[int] = []
    swa._on_evicted = evicted.append
    for fa_block in range(100, 100 + count):
        swa.allocate(fa_block, 0)
    return evicted


def test_block_in_use_is_not_evicted_until_its_last_user_has_left() -> None:
    swa = SWACacheManager(2, 2)
    swa.allocate(1, 0)
    swa.fix_content(1)
    swa.set_reclaimable(1, False)
    swa.set_reclaimable(1, True)
    with pytest.raises(IndexError):
        swa.allocate(2, 0)
    swa.set_reclaimable(1, True)
    assert swa.allocate(2, 0) == 1


def test_block_whose_content_is_not_fixed_is_idle_at_once() -> None:
    """It is never a candidate: nobody could find what it holds."""
    swa = SWACacheManager(2, 3, pytest.fail)
    swa.allocate(1, 0)
    swa.set_reclaimable(1, True)
    assert not swa.is_used(1)
    assert (swa.num_free_blocks, swa.num_free_cached_blocks) == (2, 0)
    swa.allocate(1, 0)
    swa.allocate(2, 0)
    swa.check_integrity({1: 1, 2: 1})


def test_content_that_is_forgotten_makes_the_block_idle() -> None:
    swa = SWACacheManager(2, 2, pytest.fail)
    cached(swa, 1, 0, hits=3)
    assert swa.forget_content(1)
    assert not swa.forget_content(1)
    assert not swa.fix_content(1), "there is no block any more"
    assert swa.allocate(2, 0) == 1
    swa.check_integrity({2: 1})


def test_block_in_use_outlives_its_content() -> None:
    swa = SWACacheManager(2, 2)
    swa.allocate(1, 0)
    swa.fix_content(1)
    swa.forget_content(1)
    assert swa.is_used(1)
    assert not swa.is_valid(1)
    swa.set_reclaimable(1, True)
    assert swa.num_free_cached_blocks == 0


def test_hits_are_forgotten_with_the_block() -> None:
    swa = SWACacheManager(2, 3)
    cached(swa, 1, 0, hits=5)
    swa.forget_content(1)
    cached(swa, 1, 9)
    cached(swa, 2, 0, hits=1)
    assert order_of_eviction(swa, 1) == [1]


def test_second_block_for_one_full_attention_block_is_refused() -> None:
    swa = SWACacheManager(2, 3)
    swa.allocate(1, 0)
    with pytest.raises(AssertionError, match="has a block already"):
        swa.allocate(1, 0)


def test_void_entries_do_not_pile_up() -> None:
    """A block that is taken and given back in every step leaves an entry each time."""
    swa = SWACacheManager(2, 3)
    cached(swa, 1, 0)
    for _ in range(5000):
        swa.set_reclaimable(1, False)
        swa.set_reclaimable(1, True)
    assert len(swa._candidates) < 100
    assert order_of_eviction(swa, 2) == [1]


@dataclass
class Expected:
    """What the plain model knows of a block."""

    prefix: int
    hits: int = 0
    users: int = 1
    fixed: bool = False
    since: int = 0


class SWACacheMachine(RuleBasedStateMachine):
    """Against a model that sorts all candidates whenever one is wanted."""

    @initialize(num_blocks=st.integers(1, 8))
    def create(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.swa = SWACacheManager(2, num_blocks + 1, self.evicted.append)
        self.num_blocks = num_blocks
        self.known: dict[int, Expected] = {}
        self.now = 0

    @rule(fa_block=st.integers(1, 12), prefix=st.integers(0, 3))
    def allocate(self, fa_block: int, prefix: int) -> None:
        if fa_block in self.known:
            return
        candidates = self._candidates()
        if len(self.known) < self.num_blocks:
            victims = []
        elif not candidates:
            with pytest.raises(IndexError):
                self.swa.allocate(fa_block, prefix)
            return
        else:
            victims = candidates[:1]
        self.evicted.clear()
        self.swa.allocate(fa_block, prefix)
        assert self.evicted == victims
        for victim in victims:
            del self.known[victim]
        self.known[fa_block] = Expected(prefix)

    @precondition(lambda self: getattr(self, "known", None))
    @rule(data=st.data(), what=st.sampled_from(["take", "give back", "give back", "hit", "fix", "fix", "forget"]))
    def change(self, data: st.DataObject, what: str) -> None:
        fa_block = data.draw(st.sampled_from(sorted(self.known)))
        block = self.known[fa_block]
        if what == "take":
            self.swa.set_reclaimable(fa_block, False)
            block.users += 1
        elif what == "give back" and block.users:
            self.swa.set_reclaimable(fa_block, True)
            block.users -= 1
            self._touch(block)
        elif what == "hit":
            self.swa.increment_hit_count(fa_block)
            block.hits += 1
            self._touch(block)
        elif what == "fix":
            assert self.swa.fix_content(fa_block)
            block.fixed = True
        elif what == "forget":
            assert self.swa.forget_content(fa_block) == block.fixed
            block.fixed = False
        if not block.users and not block.fixed:
            del self.known[fa_block]

    def _touch(self, block: Expected) -> None:
        self.now += 1
        block.since = self.now

    def _candidates(self) -> list[int]:
        free = [(b.hits, b.prefix, b.since, fa_block) for fa_block, b in self.known.items() if not b.users]
        assert all(self.known[fa_block].fixed for *_, fa_block in free)
        return [fa_block for *_, fa_block in sorted(free)]

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "swa"):
            return
        self.swa.check_integrity({fa_block: block.users for fa_block, block in self.known.items()})
        assert self.swa.num_free_cached_blocks == len(self._candidates())
        assert self.swa.num_free_blocks == self.num_blocks - sum(b.users > 0 for b in self.known.values())
        assert {fa_block for fa_block in range(1, 13) if self.swa.is_valid(fa_block)} == {
            fa_block for fa_block, block in self.known.items() if block.fixed
        }


TestSWACache = SWACacheMachine.TestCase
