"""Blocks: handed out once, found by content until they are handed out again, reused in the right order."""

from __future__ import annotations

import pytest

from ksana.kv.block import FreeBlockQueue, KVCacheBlock
from ksana.kv.block_pool import BlockPool

HASH_A, HASH_B = b"a", b"b"


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(block.block_id for block in pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(IndexError, match="1 KV cache blocks wanted, 0 free"):
        pool.allocate(1)


def test_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(IndexError):
        pool.allocate(4)
    assert pool.num_free_blocks == 3
    pool.check_integrity({})


def test_freed_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.register(block, HASH_A)
    pool.release([block])
    assert pool.find(HASH_A) is block
    assert pool.allocate(1) == [block]
    assert pool.find(HASH_A) is None
    assert pool.cached_blocks() == {}


def test_longest_unused_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    old, new = pool.allocate(2)
    pool.register(old, HASH_A)
    pool.register(new, HASH_B)
    pool.release([old])
    pool.release([new])
    assert pool.allocate(1) == [old]
    assert pool.find(HASH_B) is new


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = pool.allocate(2)
    pool.register(cached, HASH_A)
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(HASH_A) is cached


def test_touched_block_is_not_handed_out() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, HASH_A)
    pool.release([first, second])
    pool.touch([first])
    assert pool.allocate(1) == [second]
    assert pool.num_free_blocks == 0
    assert pool.find(HASH_A) is first


def test_block_is_free_only_after_its_last_user_has_left() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.touch([block])
    pool.release([block])
    assert pool.num_free_blocks == 0
    pool.release([block])
    assert pool.num_free_blocks == 1


def test_second_block_of_a_content_does_not_replace_the_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, HASH_A)
    pool.register(second, HASH_A)
    pool.release([second])
    assert pool.find(HASH_A) is first
    assert pool.allocate(1) == [second]
    assert pool.find(HASH_A) is first
    pool.check_integrity({1: 1, 2: 1})


def test_block_that_takes_the_place_of_another_is_found_instead() -> None:
    """The other one is of no use any more, and goes first; unless somebody still uses it."""
    pool = BlockPool(4)
    unused, other, block = pool.allocate(3)
    pool.register(unused, HASH_A)
    pool.register(other, HASH_B)
    pool.release([other, unused])
    pool.replace(unused, block)
    assert pool.find(HASH_A) is block
    pool.check_integrity({block.block_id: 1})
    assert pool.allocate(1) == [unused]
    pool.replace(block, unused)
    assert pool.find(HASH_A) is unused
    pool.check_integrity({block.block_id: 1, unused.block_id: 1})


def test_eviction_is_told_while_the_block_can_still_be_found() -> None:
    pool = BlockPool(3)
    told: list[bytes | None] = []
    pool.on_evicted = lambda block: told.append(block.block_hash)
    cached, plain = pool.allocate(2)
    pool.register(cached, HASH_A)
    pool.release([cached, plain])
    pool.allocate(1)
    assert told == []
    pool.allocate(1)
    assert told == [HASH_A]


def test_cleared_cache_finds_nothing_and_keeps_blocks_in_use() -> None:
    pool = BlockPool(3)
    used, unused = pool.allocate(2)
    pool.register(used, HASH_A)
    pool.register(unused, HASH_B)
    pool.release([unused])
    assert pool.clear_cached() == [used, unused]
    assert pool.find(HASH_A) is None
    assert pool.find(HASH_B) is None
    pool.check_integrity({used.block_id: 1})


def test_integrity_check_names_the_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=r"KVCacheBlock\(1, ref_cnt=1.* in 0 block tables"):
        pool.check_integrity({})


def test_integrity_check_finds_a_stale_index_entry() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.register(block, HASH_A)
    block.block_hash = None
    with pytest.raises(AssertionError, match="under another hash"):
        pool.check_integrity({1: 1})


def test_free_queue_removes_from_the_middle_and_the_ends() -> None:
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[2])
    queue.remove(blocks[0])
    queue.remove(blocks[3])
    queue.append(blocks[3])
    queue.prepend(blocks[2])
    assert [block.block_id for block in queue] == [2, 1, 3]
    assert [queue.popleft().block_id for _ in range(queue.num_blocks)] == [2, 1, 3]
    with pytest.raises(IndexError, match="no free KV cache block"):
        queue.popleft()


def test_free_queue_notices_a_block_that_is_freed_twice() -> None:
    block = KVCacheBlock(1)
    queue = FreeBlockQueue([block])
    with pytest.raises(AssertionError, match="already in the free queue"):
        queue.append(block)
