"""The blocks of full attention: which are free, and which full ones can be found by their content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ksana.kv.block import FreeBlockQueue, KVCacheBlock


class BlockPool:
    """Hands out blocks and keeps the index of cached ones.

    Block 0 is the null block, which is never handed out. A freed block keeps its content and its hash until it is
    handed out again, so it can still be found (``touch``).

    Args:
        num_blocks: blocks in the cache tensors, the null block included; at least 2.

    Attributes:
        on_evicted: called for each findable block that is about to be handed out again.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self.blocks[1:])
        self._cached: dict[bytes, KVCacheBlock] = {}
        self._num_free_cached = 0
        self.on_evicted: Callable[[KVCacheBlock], None] | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, cached but unused ones included."""
        return self._free.num_blocks

    @property
    def num_free_cached_blocks(self) -> int:
        """Of those, the ones that can be found by content."""
        return self._num_free_cached

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that exist for requests: all but the null block."""
        return len(self.blocks) - 1

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """The cached block of that content, in use or not."""
        return self._cached.get(block_hash)

    def find_run(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The cached blocks of the first ``max_blocks`` hashes, up to the first one that is not there."""
        run = []
        find = self._cached.get
        for block_hash in block_hashes[:max_blocks]:
            block = find(block_hash)
            if block is None:
                break
            run.append(block)
        return run

    def cached_blocks(self) -> dict[bytes, KVCacheBlock]:
        """All blocks that can be found, by hash; a copy."""
        return self._cached.copy()

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Hand out ``count`` blocks with ``ref_cnt`` 1, evicting the longest unused. Raises IndexError if too few."""
        if count > self._free.num_blocks:
            raise IndexError(f"{count} KV cache blocks wanted, {self._free.num_blocks} free")
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            self._evict(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each block; those that were free leave the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
                self._num_free_cached -= block.block_hash is not None
            block.ref_cnt += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block, in the order in which they should be reused.

        Pass a request's blocks last first: the tail of a chain is useless without its head, so it must go earlier.
        Blocks that nobody can find by content go before all cached ones.
        """
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} released more often than taken"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    self._num_free_cached += 1

    def register(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full, committed block findable. The first block of a content keeps the entry."""
        if block_hash not in self._cached:
            block.block_hash = block_hash
            self._cached[block_hash] = block

    def replace(self, cached: KVCacheBlock, block: KVCacheBlock) -> None:
        """Let ``block``, which is in use, be found in place of ``cached``, which has the same content."""
        assert cached.block_hash is not None and block.block_hash is None and block.ref_cnt > 0
        self._cached[cached.block_hash] = block
        block.block_hash, cached.block_hash = cached.block_hash, None
        if cached.ref_cnt == 0:  # of no use to anybody now: the first to be reused
            self._num_free_cached -= 1
            self._free.remove(cached)
            self._free.prepend(cached)

    def clear_cached(self) -> list[KVCacheBlock]:
        """Forget all contents (blocks in use stay in use). Returns the blocks that could be found."""
        forgotten = list(self._cached.values())
        for block in forgotten:
            block.block_hash = None
        self._cached.clear()
        self._num_free_cached = 0
        return forgotten

    def check_integrity(self, ref_counts: dict[int, int]) -> None:
        """Compare with the truth. O(blocks): for tests and idle moments.

        Args:
            ref_counts: users of each block id, counted from the block tables.

        Raises:
            AssertionError: saying which block is wrong.
        """
        free_ids = [block.block_id for block in self._free]
        assert len(free_ids) == len(set(free_ids)) == self._free.num_blocks, "the free queue is damaged"
        free = set(free_ids)
        for block in self.blocks[1:]:
            expected = ref_counts.get(block.block_id, 0)
            assert block.ref_cnt == expected, f"{block}: in {expected} block tables"
            assert (block.ref_cnt == 0) == (block.block_id in free), f"{block}: lost or in use while free"
            if block.block_hash is not None:
                assert self._cached.get(block.block_hash) is block, f"{block}: has a hash that the index does not know"
        free_cached = sum(block.ref_cnt == 0 for block in self._cached.values())
        assert self._num_free_cached == free_cached, f"{self._num_free_cached} for {free_cached} free cached blocks"
        for block_hash, block in self._cached.items():
            assert block.block_hash == block_hash, f"{block}: the index knows it under another hash"

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            if self.on_evicted is not None:
                self.on_evicted(block)
            del self._cached[block.block_hash]
            block.block_hash = None
            self._num_free_cached -= 1
