"""How many blocks requests take at most: what is admitted must fit."""

from __future__ import annotations

import operator

from ksana.kv.prefix_cache import PrefixCache, PrefixHit
from ksana.types.kv import BlockCounts, cdiv


class Capacity:
    """Counts blocks of each pool: full attention's (logical ones too), then those of each window.

    Args:
        cache: the pools.
        block_size: tokens per block.
    """

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size

    def fits_empty(self, counts: BlockCounts) -> bool:
        """True if so many blocks exist."""
        exist = [self._cache.pool.num_usable_blocks, *(swa.num_usable_blocks for swa in self._cache.windows)]
        return all(map(operator.le, counts, exist))

    def can_admit(self, hit: PrefixHit, needed: BlockCounts, reserve: int) -> bool:
        """True if a request of ``needed`` blocks, ``hit`` among them, leaves ``reserve`` blocks of each pool."""
        full, *windows = needed
        shared = sum(1 for block in hit.blocks if block.ref_cnt > 0)
        if full - shared + reserve > self._cache.pool.num_free_blocks:
            return False
        for swa, count in zip(self._cache.windows, windows, strict=True):
            shared = sum(1 for block in hit.blocks[-swa.window_blocks :] if swa.is_used(block.block_id))
            if count - shared + reserve > swa.num_free_blocks:
                return False
        return True

    def has_room(self, hit: PrefixHit, num_blocks: int, num_full: int) -> bool:
        """True if a table of ``num_blocks`` blocks that begins with ``hit`` could be made now.

        Blocks of the hit that nobody uses count too: taking them makes them no longer free.

        Args:
            num_full: those from which windows go on; they need nothing but the last W_blocks of them.
        """
        num_cached = len(hit.blocks)
        unused = sum(1 for block in hit.blocks if block.ref_cnt == 0)
        if num_blocks - num_cached + unused > self._cache.pool.num_free_blocks:
            return False
        for swa in self._cache.windows:
            start = max(0, num_full - swa.window_blocks)
            unused = sum(1 for block in hit.blocks[start:] if not swa.is_used(block.block_id))
            if num_blocks - max(num_cached, start) + unused > swa.num_free_blocks:
                return False
        return True

    def max_request_tokens(self, limit: int, max_chunk: int) -> int:
        """Longest request (at most ``limit`` tokens) that fits the empty cache if computed ``max_chunk`` at a time."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits_empty(self.peak_blocks(middle, max_chunk)):
                low = middle
            else:
                high = middle - 1
        return low

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> BlockCounts:
        """Most blocks that a request of that size holds at any moment, computed ``max_chunk`` tokens at a time."""
        total = cdiv(num_tokens, self._block_size)
        if not self._cache.windows:
            return (total,)
        # Between steps a window has its full blocks, and one that is being filled; a chunk adds its own.
        chunk = cdiv(min(max_chunk, num_tokens) - 1, self._block_size)
        return (total, *(min(total, swa.window_blocks + 1 + chunk) for swa in self._cache.windows))

    def peak_blocks_of_beams(self, count: int, num_shared_tokens: int, num_tokens: int, max_chunk: int) -> BlockCounts:
        """Like :meth:`peak_blocks`, for ``count`` requests of that size together, which begin with the same tokens."""
        total, *windows = self.peak_blocks(num_tokens, max_chunk)
        shared = num_shared_tokens // self._block_size
        return (count * total - (count - 1) * shared, *(count * window for window in windows))
