"""How long a stored prefix is, against looking at every end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ksana.connectors.block_store import BlockNamespace, BlockStore
from ksana.connectors.prefix_lookup import PrefixLookup
from ksana.testing.kv_connector_engine import make_connector_cache

NAMESPACE = BlockNamespace("model", "plain")
WINDOWS: list[list[int | None]] = [[None], [None, 5], [None, 3, 9], [8]]


class Hash(bytes):
    """A block's hash that counts how often a key is made of it."""

    num_keys = 0

    def hex(self) -> str:  # type: ignore[override]
        Hash.num_keys += 1
        return super().hex()


class Store(BlockStore):
    """What has a key in a set."""

    def __init__(self, keys: set[str]) -> None:
        self.keys = keys

    def contains(self, keys: Sequence[str]) -> int:
        return next((count for count, key in enumerate(keys) if key not in self.keys), len(keys))

    def get(self, keys: Sequence[str], buffers: object) -> list[bool]:
        raise NotImplementedError

    def put(self, keys: Sequence[str], buffers: object) -> list[bool]:
        raise NotImplementedError


def hashes(count: int) -> list[Hash]:
    return [Hash(index.to_bytes(4, "big")) for index in range(count)]


@given(st.data())
def test_the_longest_usable_prefix_is_found(data: st.DataObject) -> None:
    kv = make_connector_cache(data.draw(st.sampled_from(WINDOWS)))
    end = data.draw(st.integers(0, 12))
    first, blocks = data.draw(st.integers(0, end)), hashes(end)
    stored = {
        (group_id, index)
        for group_id in range(len(kv.groups))
        for index in range(end)
        if data.draw(st.integers(0, 3))  # three of four
    }
    keys = {NAMESPACE.key(blocks[index], group_id) for group_id, index in stored}

    def is_usable(last: int) -> bool:
        return all(
            (group_id, index) in stored
            for group_id, group in enumerate(kv.groups)
            for index in range(max(first, last - (group.window_blocks or last)), last)
        )

    expected = max(last - first for last in range(first, end + 1) if is_usable(last))
    assert PrefixLookup(Store(keys), NAMESPACE, kv).num_blocks(blocks, first, end) == expected


def test_a_window_that_has_gone_costs_a_key_a_block() -> None:
    """Not a window's keys for each end that is tried: with a long prompt that took a fifth of a second."""
    kv = make_connector_cache([None, 256])
    blocks = hashes(1000)
    store = Store({NAMESPACE.key(block, 0) for block in blocks})
    Hash.num_keys = 0
    assert PrefixLookup(store, NAMESPACE, kv).num_blocks(blocks, 0, 1000) == 0
    assert Hash.num_keys == 2000
