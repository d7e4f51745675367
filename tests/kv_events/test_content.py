"""A cache put together from events, and events from a cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ksana.kv_events.content import MAX_EVENT_SIZE, CacheContent
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 2


def block(block_hash: int, parent: int | None, group_id: int = 0) -> BlockStored:
    return BlockStored((block_hash,), parent, (block_hash, block_hash), SIZE, group_id)


@given(st.data())
def test_a_dump_makes_the_same_content_with_parents_before_children(data: st.DataObject) -> None:
    """Whatever the shape of the trees, whichever blocks are gone, and in which order the others came."""
    parents: dict[int, int | None] = {}
    for block_hash in range(1, data.draw(st.integers(0, 30)) + 1):
        parents[block_hash] = data.draw(st.sampled_from([None, *parents]))
    kept = data.draw(st.permutations(sorted(parents)))[: data.draw(st.integers(0, len(parents)))]
    content = CacheContent()
    content.apply([block(block_hash, parents[block_hash], group_id) for block_hash in kept for group_id in (0, 1)])
    content.apply([BlockRemoved(tuple(kept[:3]), 1)])

    copy, told = CacheContent(), set()
    copy.apply([block(99, None)])  # a dump replaces what is there
    events = list(content.as_events())
    for event in events:
        copy.apply([event])
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            present = parent in content.block_hashes(event.group_id)
            assert (parent, event.group_id) in told or not present
            told |= {(block_hash, event.group_id) for block_hash in event.block_hashes}
    groups = {group_id: group.blocks for group_id, group in content.groups.items() if group.blocks}
    assert {group_id: group.blocks for group_id, group in copy.groups.items()} == groups


def test_a_dump_joins_what_follows_each_other() -> None:
    """One event for each block would be a message of many times the size."""
    content = CacheContent()
    count = 3 * MAX_EVENT_SIZE // SIZE
    content.apply([block(index, index - 1 if index else None) for index in range(count)])
    stored = [event for event in content.as_events() if isinstance(event, BlockStored)]
    assert [len(event.token_ids) for event in stored] == [MAX_EVENT_SIZE] * 3


def test_events_that_come_twice_change_nothing() -> None:
    content = CacheContent()
    content.apply([block(1, None), block(1, None), BlockRemoved((1,)), BlockRemoved((1,)), BlockRemoved((1,), 5)])
    assert content.num_blocks == 0


def test_clearing_is_for_all_groups() -> None:
    content = CacheContent()
    content.apply([block(1, None), block(1, None, 3), AllBlocksCleared()])
    assert content.num_blocks == 0


def test_a_copy_does_not_follow() -> None:
    content = CacheContent()
    content.apply([block(1, None)])
    copy = content.copy()
    content.apply([block(2, 1)])
    assert (copy.block_hashes(), content.block_hashes()) == ({1}, {1, 2})
