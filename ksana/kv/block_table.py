"""The blocks of one request: of full attention, and what each sliding window holds of them."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.kv.block import KVCacheBlock
from ksana.kv.prefix_cache import PrefixCache
from ksana.types.kv import BlockCopy
from ksana.types.step import BlockIds


class BlockTable:
    """Blocks in token order (with the state of the original's ``PrefixCachedRequest``).

    Block i holds tokens [i * block_size, (i + 1) * block_size). A window has blocks for the last of them only; where
    it has none, its table has a hole, which is block 0.

    Args:
        cache: where blocks come from.
        prefix: cached blocks to begin with, as :meth:`PrefixCache.find` has found them; they are taken over.

    Attributes:
        blocks: full attention's.
        windows: physical block ids, one list for each window, as long as ``blocks``.
        window_starts: for each window, the first block that it may have; only holes are before it.
        capacity: tokens that there is room for; -1 while the request may not grow.
        num_registered: blocks that :meth:`PrefixCache.register` has seen.
        is_forked: the last block may be shared with another request.
        is_remote_loading: blocks are being loaded, or are about to be, and the request must not go on.
        is_remote_loading_block_allocated: the blocks that are loaded have been allocated.
    """

    __slots__ = (
        "_cache",
        "blocks",
        "capacity",
        "is_forked",
        "is_remote_loading",
        "is_remote_loading_block_allocated",
        "num_registered",
        "window_starts",
        "windows",
    )

    def __init__(self, cache: PrefixCache, prefix: list[KVCacheBlock]) -> None:
        cache.take(prefix)
        self._cache = cache
        self.blocks = list(prefix)
        self.window_starts = [max(0, len(prefix) - swa.window_blocks) for swa in cache.windows]
        self.windows = [
            [0] * start + [swa.block_id_of(block.block_id) for block in prefix[start:]]
            for swa, start in zip(cache.windows, self.window_starts, strict=True)
        ]
        self.num_registered = len(prefix)
        self.capacity = 0
        self.is_forked = False
        self.is_remote_loading = False
        self.is_remote_loading_block_allocated = False

    def extend(self, num_blocks: int, window_starts: Sequence[int] | None = None) -> None:
        """Allocate until there are ``num_blocks`` blocks; the caller has made sure that there are so many.

        Args:
            window_starts: for each window, the first of the new blocks that it shall have; by default the attribute.
        """
        cache, first = self._cache, len(self.blocks)
        if num_blocks <= first:
            return
        new = cache.pool.allocate(num_blocks - first)
        self.blocks += new
        starts = self.window_starts if window_starts is None else window_starts
        for swa, window, start in zip(cache.windows, self.windows, starts, strict=True):
            for index, block in enumerate(new, first):
                window.append(swa.allocate(block.block_id, index) if index >= start else 0)

    def truncate(self, num_blocks: int) -> None:
        """Give back all but the first ``num_blocks`` blocks."""
        for place, window in enumerate(self.windows):
            for index in range(max(num_blocks, self.window_starts[place]), len(window)):
                self.drop_from_window(place, index)
            del window[num_blocks:]
        # The tail of a chain is to be reused first.
        self._cache.pool.release(reversed(self.blocks[num_blocks:]))
        del self.blocks[num_blocks:]

    def drop_behind_windows(self, num_full: int) -> None:
        """Give back what windows no longer need when ``num_full`` blocks are full: all but their last W_blocks."""
        for place, swa in enumerate(self._cache.windows):
            start, end = self.window_starts[place], num_full - swa.window_blocks
            if end <= start:
                continue
            self.window_starts[place] = end
            for index in range(start, min(end, len(self.blocks))):
                self.drop_from_window(place, index)

    def drop_from_window(self, place: int, index: int) -> None:
        """Leave a hole for block ``index`` in a window's table, if there is none."""
        if self.windows[place][index]:
            self._cache.windows[place].set_reclaimable(self.blocks[index].block_id, True)
            self.windows[place][index] = 0

    def fork(self, num_blocks: int) -> BlockTable:
        """Another request's table, which shares the first ``num_blocks`` blocks."""
        child = BlockTable(self._cache, [])
        child.blocks = self.blocks[:num_blocks]
        self._cache.pool.touch(child.blocks)
        child.window_starts = list(self.window_starts)
        child.windows = [window[:num_blocks] for window in self.windows]
        for swa, window, start in zip(self._cache.windows, child.windows, child.window_starts, strict=True):
            for block, block_id in zip(child.blocks[start:], window[start:], strict=True):
                if block_id:
                    swa.set_reclaimable(block.block_id, False)
        child.num_registered = min(self.num_registered, num_blocks)
        self.is_forked = child.is_forked = True
        return child

    def is_shared(self, index: int) -> bool:
        """True if another request uses block ``index`` too, or may come to: it is found by content."""
        block = self.blocks[index]
        return block.ref_cnt > 1 or block.block_hash is not None

    def unshare(self, index: int) -> list[BlockCopy]:
        """Replace the shared block ``index`` by one of the request's own; returns what is to be copied."""
        cache, shared = self._cache, self.blocks[index]
        own = self.blocks[index] = cache.pool.allocate(1)[0]
        copies = [] if cache.fa_group_id is None else [(cache.fa_group_id, shared.block_id, own.block_id)]
        for group_id, swa, window in zip(cache.window_group_ids, cache.windows, self.windows, strict=True):
            if window[index]:
                block_id = swa.allocate(own.block_id, index)
                copies.append((group_id, window[index], block_id))
                swa.set_reclaimable(shared.block_id, True)
                window[index] = block_id
        cache.pool.release([shared])
        return copies

    def block_ids(self, first: int = 0) -> BlockIds:
        """Entries from ``first`` on, one list for each KV cache group."""
        windows = [window[first:] for window in self.windows]
        return self._with_full_attention(first, windows)

    def kept_block_ids(self, first: int = 0) -> BlockIds:
        """The same with blocks that a window has given back, where they still hold what they held."""
        blocks = self.blocks[first:]
        windows = [
            [
                block_id or (swa.block_id_of(block.block_id) if swa.is_valid(block.block_id) else 0)
                for block, block_id in zip(blocks, window[first:], strict=True)
            ]
            for swa, window in zip(self._cache.windows, self.windows, strict=True)
        ]
        return self._with_full_attention(first, windows)

    def _with_full_attention(self, first: int, windows: list[list[int]]) -> BlockIds:
        if self._cache.fa_group_id is None:
            return tuple(windows)
        return ([block.block_id for block in self.blocks[first:]], *windows)
