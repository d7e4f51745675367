"""Block tables of one KV cache group: full attention and sliding window.

The manager keeps one of these per group; what differs between them is which blocks a request still needs, and which
cached prefixes are usable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ksana.kv.block import KVCacheBlock
from ksana.kv.block_pool import BlockPool
from ksana.types.kv import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, cdiv


class BlockTables(ABC):
    """The block tables of all requests in one group.

    Attributes:
        tables: blocks of each request, in token order; index i holds tokens [i * block_size, (i + 1) * block_size).
    """

    def __init__(self, group_id: int, block_size: int, pool: BlockPool) -> None:
        self.group_id = group_id
        self.block_size = block_size
        self.pool = pool
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self._num_registered: dict[str, int] = {}

    @abstractmethod
    def find_longest_hit(self, block_hashes: list[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """Blocks of the longest usable cached prefix of at most ``max_blocks`` blocks, holes as null blocks."""

    @abstractmethod
    def num_skippable_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from ``num_computed_tokens`` on will look at."""

    @abstractmethod
    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks a request of ``num_tokens`` tokens, computed ``max_chunk`` at a time, holds at any moment."""

    @abstractmethod
    def num_lasting_blocks(self, num_tokens: int) -> int:
        """Full blocks of the first ``num_tokens`` tokens that are kept as long as the request is."""

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: list[KVCacheBlock]) -> int:
        """Free blocks that adding ``hit`` and then growing the table to ``num_tokens`` would take.

        Blocks of the hit that nobody uses at present count too: touching them takes them out of the free queue.
        """
        held = len(self.tables.get(request_id, ())) + len(hit)
        revived = sum(1 for block in hit if block.ref_cnt == 0 and block is not self.pool.null_block)
        return max(0, cdiv(num_tokens, self.block_size) - held) + revived

    def add_hit(self, request_id: str, hit: list[KVCacheBlock]) -> None:
        """Start the table of a request with the blocks of a cached prefix."""
        self.pool.touch(hit)
        self.tables[request_id] = list(hit)
        self._num_registered[request_id] = len(hit)

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Allocate until the table has room for ``num_tokens`` tokens."""
        table = self.tables[request_id]
        missing = cdiv(num_tokens, self.block_size) - len(table)
        if missing > 0:
            table.extend(self.pool.allocate(missing))

    def drop_skippable(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back leading blocks that the request will not look at again, leaving null blocks in their place."""
        table = self.tables[request_id]
        null = self.pool.null_block
        dropped = []
        # From the newest backwards: everything before the first hole was dropped earlier.
        for index in range(min(self.num_skippable_blocks(num_computed_tokens), len(table)) - 1, -1, -1):
            if table[index] is null:
                break
            dropped.append(table[index])
            table[index] = null
        self.pool.release(dropped)

    def register_full(self, request_id: str, block_hashes: list[bytes], num_full: int) -> None:
        """Make the request's first ``num_full`` blocks findable."""
        table = self.tables[request_id]
        null = self.pool.null_block
        for index in range(self._num_registered[request_id], num_full):
            if table[index] is not null:
                self.pool.register(table[index], (block_hashes[index], self.group_id))
        self._num_registered[request_id] = max(num_full, self._num_registered[request_id])

    def fork(self, parent_id: str, child_id: str, num_blocks: int) -> None:
        """Give the child the parent's first ``num_blocks`` blocks, shared."""
        shared = self.tables[parent_id][:num_blocks]
        self.pool.touch(shared)
        self.tables[child_id] = shared
        self._num_registered[child_id] = min(self._num_registered[parent_id], num_blocks)

    def is_shared(self, request_id: str, index: int) -> bool:
        """True if another request uses block ``index`` too, or may come to: it is found by content."""
        block = self.tables[request_id][index]
        return (block.ref_cnt > 1 or block.key is not None) and block is not self.pool.null_block

    def unshare(self, request_id: str, index: int) -> tuple[int, int]:
        """Replace the shared block ``index`` by one of the request's own; returns (source, destination) to copy."""
        table = self.tables[request_id]
        shared, own = table[index], self.pool.allocate(1)[0]
        table[index] = own
        self.pool.release([shared])
        return shared.block_id, own.block_id

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, the tail of the chain to be reused first."""
        self.pool.release(reversed(self.tables.pop(request_id, [])))
        self._num_registered.pop(request_id, None)


class FullAttentionTables(BlockTables):
    """Every block is needed until the request ends; any unbroken run of cached blocks from the start is usable."""

    def find_longest_hit(self, block_hashes: list[bytes], max_blocks: int) -> list[KVCacheBlock]:
        hit = []
        for block_hash in block_hashes[:max_blocks]:
            block = self.pool.find((block_hash, self.group_id))
            if block is None:
                break
            hit.append(block)
        return hit

    def num_skippable_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return cdiv(num_tokens, self.block_size)

    def num_lasting_blocks(self, num_tokens: int) -> int:
        return num_tokens // self.block_size


class SlidingWindowTables(BlockTables):
    """Only the last ``window`` tokens are looked at: a prefix is usable if the blocks of its last window are cached."""

    def __init__(self, group_id: int, block_size: int, pool: BlockPool, window: int) -> None:
        super().__init__(group_id, block_size, pool)
        self.window = window

    def find_longest_hit(self, block_hashes: list[bytes], max_blocks: int) -> list[KVCacheBlock]:
        # The next token is itself inside its window, so window - 1 earlier tokens must be there.
        needed = cdiv(self.window - 1, self.block_size)
        limit = min(max_blocks, len(block_hashes))
        hit: list[KVCacheBlock] = [self.pool.null_block] * limit
        if needed == 0:
            return hit
        run = 0
        for index in range(limit - 1, -1, -1):
            block = self.pool.find((block_hashes[index], self.group_id))
            if block is None:
                run = 0
                continue
            hit[index] = block
            run += 1
            if run >= needed:
                end = index + run
                return [self.pool.null_block] * index + hit[index:end]
        # A prefix shorter than the window is usable if it is cached from the very start.
        return hit[:run]

    def num_skippable_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        # A window and a chunk need not begin at a block's edge: one block more.
        return min(cdiv(num_tokens, self.block_size), cdiv(self.window - 1 + max_chunk, self.block_size) + 1)

    def num_lasting_blocks(self, num_tokens: int) -> int:
        return 0


def create_block_tables(group_id: int, spec: KVCacheSpec, pool: BlockPool) -> BlockTables:
    """The kind of tables that ``spec`` asks for. Raises TypeError for a spec without one."""
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowTables(group_id, spec.block_size, pool, spec.sliding_window)
    if isinstance(spec, FullAttentionSpec):
        return FullAttentionTables(group_id, spec.block_size, pool)
    raise TypeError(f"no block tables for {type(spec).__name__}")
