"""Blocks in the host's memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ksana.connectors.memory_store import MemoryStore

SLOT = 8


def block(value: int, num_layers: int = 2, size: int = SLOT) -> list[np.ndarray]:
    return [np.full(size, value + layer, dtype=np.uint8) for layer in range(num_layers)]


def read(store: MemoryStore, key: str, num_layers: int = 2) -> list[np.ndarray] | None:
    found = block(255 - num_layers, num_layers)
    return found if store.get([key], [found]) == [True] else None


def make_store(num_slots: int) -> MemoryStore:
    return MemoryStore(num_slots * SLOT + SLOT - 1, SLOT)


def test_the_longest_unused_block_goes_first() -> None:
    store = make_store(6)
    store.put(["a", "b", "c"], [block(1), block(2), block(3)])
    assert store.touch(["a", "x"]) == [True, False]
    assert read(store, "b") is not None
    assert store.put(["d"], [block(4)]) == [True]
    assert [store.contains([key]) for key in "abcd"] == [1, 1, 0, 1]


def test_blocks_of_few_and_of_many_layers_share_the_memory() -> None:
    store = make_store(6)
    assert store.put(["wide", "narrow"], [block(1, 5), block(2, 1)]) == [True, True]
    assert store.put(["two"], [block(3, 2)]) == [True], "the wide one goes, and what it had is divided"
    assert (store.contains(["wide"]), store.contains(["narrow"]), store.contains(["two"])) == (0, 1, 1)
    assert store.put(["too large"], [block(4, 7)]) == [False]
    assert store.contains(["narrow"]) == 1, "nothing is evicted for what can never fit"


def test_layers_may_be_smaller_than_a_slot() -> None:
    store = make_store(2)
    store.put(["a"], [block(1, size=3)])
    found = block(0, size=3)
    assert store.get(["a"], [found]) == [True]
    assert [layer.tolist() for layer in found] == [[1, 1, 1], [2, 2, 2]]


def test_what_is_pinned_stays_and_keeps_its_content() -> None:
    store = make_store(4)
    store.put(["a", "b"], [block(1), block(2)])
    assert store.pin(["a", "missing", "a"]) == ["a", "a"]
    assert [store.put([key], [block(3)]) for key in "cde"] == [[True]] * 3
    store.clear()
    assert store.contains(["a"]) == 0, "cleared all the same"
    assert store.put(["a"], [block(9)]) == [False], "its old content may still be read"
    store.unpin(["a", "a"])
    assert (store.num_pins, store.num_blocks) == (0, 0)
    assert store.put(["a"], [block(9)]) == [True]


def test_reserved_places_outlive_everything_but_their_owner() -> None:
    store = make_store(6)
    store.put(["a", "b"], [block(1), block(2)])
    assert not store.reserve(["s1", "s2"], [4, 3])
    assert store.contains(["a", "b"]) == 2, "nothing has changed"
    assert store.reserve(["s1", "s2"], [2, 2])
    assert store.contains(["s1"]) == 0, "nothing is there yet"
    store.fill(["s1", "s2"], [block(7), block(8)])
    store.put(["c", "d"], [block(3), block(4)])
    store.clear()
    found = read(store, "s1")
    assert found is not None and found[0][0] == 7
    store.discard(["s1", "s2"])
    assert (store.num_blocks, store.num_pins) == (0, 0)
    store.fill(["s1"], [block(1)])
    assert store.num_blocks == 0, "too late to be kept"


def test_what_cannot_be_copied_leaves_nothing_behind() -> None:
    """Neither a place that is never free again, nor a key that can never be stored."""
    store, too_large = make_store(4), block(1, size=SLOT + 1)
    with pytest.raises(ValueError, match="broadcast"):
        store.put(["a"], [too_large])
    assert (store.num_pins, store.num_blocks) == (0, 0)
    assert store.put(["a"], [block(1)]) == [True]
    with pytest.raises(ValueError, match="broadcast"):
        store.get(["a"], [too_large])
    assert store.num_pins == 0
    assert store.reserve(["s"], [2])
    with pytest.raises(ValueError, match="broadcast"):
        store.fill(["s"], [too_large])
    assert read(store, "s") is None
    store.discard(["s"])
    assert (store.num_pins, store.num_blocks) == (0, 1)


class MemoryStoreMachine(RuleBasedStateMachine):
    """Any order of calls: against a dictionary that knows what was put, and never loses a slot."""

    keys = st.sampled_from([f"k{i}" for i in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(9)
        self.values: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.pins: list[str] = []
        self.reserved: list[str] = []
        self.number = 0

    @rule(key=keys, num_layers=st.integers(1, 4))
    def put(self, key: str, num_layers: int) -> None:
        num_layers = self.layers.setdefault(key, num_layers)
        is_new = self.store.contains([key]) == 0
        self.number = (self.number + 5) % 200
        (is_stored,) = self.store.put([key], [block(self.number, num_layers)])
        assert self.store.contains([key]) == is_stored
        if is_stored and is_new:
            self.values[key] = self.number

    @rule(key=keys)
    def get(self, key: str) -> None:
        is_there = self.store.contains([key]) == 1
        found = read(self.store, key, self.layers.get(key, 1))
        assert (found is not None) == is_there
        if found is not None:
            assert [layer[0] for layer in found] == [self.values[key] + i for i in range(len(found))]

    @rule(key=keys)
    def pin(self, key: str) -> None:
        self.pins += self.store.pin([key])

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.store.unpin([self.pins.pop()])

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def reserve(self, sizes: list[int]) -> None:
        self.number += 1
        keys = [f"swap-{self.number}-{index}-{len(self.reserved)}" for index in range(len(sizes))]
        if self.store.reserve(keys, sizes):
            self.reserved += keys

    @precondition(lambda self: self.reserved)
    @rule()
    def discard(self) -> None:
        self.store.discard([self.reserved.pop()])

    @rule()
    def clear(self) -> None:
        self.store.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        entries = list(self.store._entries.values())
        slots = self.store._free + [slot for entry in entries for slot in entry.slots]
        assert sorted(slots) == list(range(9))
        assert self.store.num_pins == len(self.pins) + len(self.reserved)
        evictable = [entry for entry in entries if entry.pins == 0]
        assert self.store._num_evictable_slots == sum(len(entry.slots) for entry in evictable)
        assert len(self.store._evictable) == len(evictable)


TestMemoryStoreMachine = MemoryStoreMachine.TestCase


def test_threads_see_whole_blocks_or_none() -> None:
    store = MemoryStore(40 * 4096, 4096)
    torn: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(400):
            value = int(random.integers(0, 40))
            key = f"k{value}"
            if random.random() < 0.5:
                store.put([key], [[np.full(4096, value, dtype=np.uint8)] * 4])
            else:
                found = [np.empty(4096, dtype=np.uint8) for _ in range(4)]
                if store.get([key], [found]) == [True] and any((layer != value).any() for layer in found):
                    torn.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert store.num_pins == 0
