"""The store, on both backends and in both ways to read: what it keeps, and what it says of what it does not keep."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ksana.testing.waiting import wait_until
from ksana_mooncake.client import StoreClient
from ksana_mooncake.connector import client_maker
from ksana_mooncake.mock_client import MockClient
from ksana_mooncake.options import GlobalCacheOptions
from ksana_mooncake.store import MooncakeStore
from ksana_mooncake.transfer import DIGEST_BYTES, address_of

Blocks = list[list[np.ndarray]]
Open = Callable[..., MooncakeStore]
Make = Callable[..., Blocks]
Count = Callable[[MooncakeStore, list[str]], int]
Connect = Callable[[GlobalCacheOptions], StoreClient]


def empty_like(blocks: Blocks) -> Blocks:
    return [[np.zeros_like(layer) for layer in block] for block in blocks]


def are_equal(one: Blocks, other: Blocks) -> bool:
    return all(
        np.array_equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def test_what_one_server_stores_another_reads(
    options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str], count_stored: Count
) -> None:
    writer, reader = open_store(options), open_store(options)
    blocks = make_blocks(4)
    assert writer.put(keys, blocks) == [True] * 4
    assert count_stored(reader, keys) == 4
    received = empty_like(blocks)
    assert reader.get(keys, received) == [True] * 4
    assert are_equal(received, blocks)


def test_blocks_of_several_sizes_share_the_store(
    options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str]
) -> None:
    store = open_store(options)
    blocks = [*make_blocks(2, layers=1, size=192), *make_blocks(2, layers=5, size=7)]
    store.put(keys, blocks)
    received = empty_like(blocks)
    assert store.get(keys, received) == [True] * 4
    assert are_equal(received, blocks)


def test_more_blocks_than_one_call_takes(
    options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str], count_stored: Count
) -> None:
    """The buffer, cut to two blocks a thread here, is filled again and again."""
    small = replace(options, local_buffer_size=options.fetch_thread_num * 2 * (192 + DIGEST_BYTES))
    store = open_store(small)
    many = [f"{keys[0]}{index}" for index in range(150)]
    blocks = make_blocks(150)
    assert all(store.put(many, blocks))
    received = empty_like(blocks)
    assert all(store.get(many, received))
    assert are_equal(received, blocks)
    assert count_stored(store, many) == 150


def test_a_gap_ends_what_is_found(
    options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str], count_stored: Count
) -> None:
    store = open_store(options)
    blocks = make_blocks(4)
    store.put([keys[0], keys[1], keys[3]], [blocks[0], blocks[1], blocks[3]])
    assert count_stored(store, keys) == 2
    assert store.get(keys, empty_like(blocks)) == [True, True, False, True]
    assert store.touch(keys) == [True, True, False, True]


def test_nothing_is_replaced(options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str]) -> None:
    """Two servers that have computed the same block both succeed, and the first one's stays."""
    one, other = open_store(options), open_store(options)
    first, second = make_blocks(1, seed=1), make_blocks(1, seed=2)
    assert one.put(keys[:1], first) == other.put(keys[:1], second) == [True]
    received = empty_like(first)
    other.get(keys[:1], received)
    assert are_equal(received, first)


def test_a_damaged_block_is_a_miss_and_can_be_stored_again(
    options: GlobalCacheOptions,
    open_store: Open,
    make_blocks: Make,
    keys: list[str],
    count_stored: Count,
    connect_client: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A value of something else, one that belongs to another key, one that is too long, and one that is right."""
    store, blocks = open_store(options), make_blocks(4)
    value, long_value = np.zeros(192 + DIGEST_BYTES, dtype=np.uint8), np.zeros(500, dtype=np.uint8)
    vandal = connect_client(options)
    store.put(keys[3:], blocks[3:])
    damaged = [(keys[0], value.copy()), (keys[1], value), (keys[2], long_value)]
    vandal.get(keys[3:], [[address_of(value)]], [[value.nbytes]])
    for key, content in damaged:
        assert vandal.put([key], [[address_of(content)]], [[content.nbytes]]) == [0]
    with caplog.at_level(logging.WARNING):
        assert store.get(keys, empty_like(blocks)) == [False, False, False, True]
    assert caplog.text.count("damaged") == 3
    assert count_stored(store, keys) == 0
    assert all(store.put(keys, blocks))
    received = empty_like(blocks)
    assert all(store.get(keys, received))
    assert are_equal(received, blocks)


def test_a_full_store_takes_no_more_and_says_so(
    own_options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str], connect_client: Connect
) -> None:
    """What was just read stays. Nothing waits for room, and what is stored is right."""
    other = connect_client(own_options)
    store = open_store(replace(own_options, local_buffer_size=4 << 20))
    many = [f"{keys[0]}{index}" for index in range(40)]
    blocks = make_blocks(40, layers=1, size=1 << 20)
    stored = []
    try:
        for key, block in zip(many, blocks, strict=True):
            stored += store.put([key], [block])
            store.touch([key])
        received = empty_like(blocks)
        loaded = store.get(many, received)
    finally:
        other.remove(f"^{keys[0]}")  # the next backend wants room
    assert True in stored
    assert False in stored
    assert any(loaded)
    assert all(are_equal([received[i]], [blocks[i]]) for i in range(40) if loaded[i])
    assert store.is_up


def test_clearing_leaves_the_blocks_of_other_models(
    options: GlobalCacheOptions, open_store: Open, make_blocks: Make, keys: list[str], count_stored: Count
) -> None:
    store = open_store(options)
    foreign = [f"f{key}" for key in keys]
    store.put([*keys, *foreign], make_blocks(8))
    assert count_stored(store, keys) == 4
    store.clear()
    assert count_stored(store, keys) == 0
    assert count_stored(store, foreign) == 4


def test_what_a_server_has_lent_goes_with_it(
    open_store: Open, own_mock: GlobalCacheOptions, make_blocks: Make, keys: list[str], count_stored: Count
) -> None:
    writer = MooncakeStore(own_mock, client_maker(own_mock), block_bytes=192, key_prefix="")
    reader = open_store(own_mock)
    wait_until(lambda: writer.is_up)
    writer.put(keys, make_blocks(4))
    writer.close()
    assert count_stored(reader, keys) == 0
    assert reader.get(keys, make_blocks(4)) == [False] * 4


def test_a_closed_store_answers_still(own_mock: GlobalCacheOptions, open_store: Open, make_blocks: Make) -> None:
    """Threads of a connector may be in the middle of something when the engine stops."""
    store = open_store(own_mock)
    store.close()
    assert store.contains(["a"]) == 0
    assert store.get(["a"], make_blocks(1)) == [False]
    assert store.put(["a"], make_blocks(1)) == [False]
    assert store.touch(["a"]) == [False]


def test_what_may_go_better_is_tried_again(own_mock: GlobalCacheOptions, open_store: Open, make_blocks: Make) -> None:
    """A replica that is not ready, in a batch of which the rest arrives."""
    calls: list[list[str]] = []

    class Hesitant(MockClient):
        def get(self, keys, addresses, sizes):  # type: ignore[no-untyped-def]
            calls.append(list(keys))
            codes = super().get(keys, addresses, sizes)
            return [-703 if key == "b" and len(calls) < 3 else code for key, code in zip(keys, codes, strict=True)]

    store = open_store(own_mock, lambda: Hesitant(own_mock))
    blocks = make_blocks(3)
    store.put(["a", "b", "c"], blocks)
    received = empty_like(blocks)
    assert store.get(["a", "b", "c"], received) == [True] * 3
    assert calls == [["a", "b", "c"], ["b"], ["b"]]
    assert are_equal(received, blocks)
