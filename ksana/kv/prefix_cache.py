"""All blocks of the cache, of full attention and of sliding windows, and the prefixes that can be found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksana.kv.block import KVCacheBlock
from ksana.kv.block_pool import BlockPool
from ksana.kv.observer import KVCacheObserver
from ksana.kv.swa_cache_manager import SWACacheManager
from ksana.types.kv import KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ksana.types.request import Request

if TYPE_CHECKING:
    from ksana.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix, free to be evicted until somebody takes it over.

    Attributes:
        blocks: of full attention.
        num_tokens: what they hold, a multiple of the block size.
    """

    blocks: list[KVCacheBlock]
    num_tokens: int


class PrefixCache:
    """Full-attention (FA) blocks, which order a sequence and are found by content, and what windows keep of them.

    A window's block belongs to one FA block, and cannot outlive it: when the FA block is evicted, so is the other. The
    reverse is not true: a window's block may be evicted alone, and its FA block is then no part of a prefix's end.

    Args:
        config: blocks and groups.
        observer: hears what becomes findable, and what no longer is.

    Attributes:
        pool: the FA blocks, or in a model without full attention the logical blocks in their place.
        windows: one for each sliding window.
        fa_group_id: KV cache group of the FA blocks; None if they are logical.
        window_group_ids: those of the windows.
    """

    def __init__(self, config: KVCacheConfig, observer: KVCacheObserver | None = None) -> None:
        self.fa_group_id = 0 if config.has_full_attention else None
        first = len(config.groups) - len(config.window_groups)
        self.window_group_ids = range(first, len(config.groups))
        self.windows = [
            self._create_window(group, group_id)
            for group_id, group in zip(self.window_group_ids, config.window_groups, strict=True)
        ]
        self.pool = BlockPool(config.num_blocks)
        self._observer = observer
        if self.windows or observer is not None:
            self.pool.on_evicted = self._fa_block_evicted

    def _create_window(self, group: KVCacheGroup, group_id: int) -> SWACacheManager:
        assert isinstance(group.spec, SlidingWindowSpec)
        return SWACacheManager(
            group.spec.window_blocks, group.num_blocks, lambda fa_block_id: self._removed(group_id, fa_block_id)
        )

    def has_free_blocks(self, count: int) -> bool:
        """True if ``count`` blocks of each kind could be handed out now."""
        return count <= self.pool.num_free_blocks and all(count <= swa.num_free_blocks for swa in self.windows)

    def find(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The longest usable prefix of at most ``max_blocks`` blocks. Free of side effects.

        Its end must be one at which a window can go on: the last W_blocks blocks before it are all valid in the SWA
        cache, for every window of the model. A prefix shorter than that is not usable.
        """
        found = self.pool.find_run(block_hashes, max_blocks)
        return found[: self._last_swa_valid_idx(found)] if self.windows else found

    def take(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One more request uses a prefix that :meth:`find` has found; its end's windows are registered."""
        self.pool.touch(blocks)
        for swa in self.windows:
            for block in blocks[max(0, len(blocks) - swa.window_blocks) :]:
                swa.set_reclaimable(block.block_id, False)
                swa.increment_hit_count(block.block_id)

    def register(self, request: Request, first: int, blocks: Sequence[KVCacheBlock], hashes: Sequence[bytes]) -> None:
        """Make full, computed blocks of a request findable.

        Args:
            first: place of ``blocks[0]`` in the request.
            hashes: of ``blocks``.
        """
        if not self.windows and self._observer is None:
            for block, block_hash in zip(blocks, hashes, strict=True):
                self.pool.register(block, block_hash)
            return
        stored: dict[int, list[int]] = {}
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True), first):
            before = self.pool.find(block_hash)
            if before is None:
                self.pool.register(block, block_hash)
                groups = [] if self.fa_group_id is None else [self.fa_group_id]
                groups += [g for g, swa in self._windows_by_group() if swa.fix_content(block.block_id)]
            else:
                groups = self._replace_poorer(before, block)
            for group_id in groups:
                stored.setdefault(group_id, []).append(index)
        if self._observer is not None:
            for group_id, indices in stored.items():
                for start, end in _runs(indices):
                    self._observer.blocks_stored(request, group_id, start, hashes[start - first : end - first])

    def forget_all(self) -> int:
        """Nothing can be found any more; returns the number of blocks forgotten."""
        hashed = self.pool.clear_cached()
        for swa in self.windows:
            for block in hashed:
                swa.forget_content(block.block_id)
        if self._observer is not None:
            self._observer.all_blocks_cleared()
        return len(hashed)

    def cached_hashes(self, group_id: int) -> set[bytes]:
        """Hashes of the blocks that can be found in a group. O(blocks)."""
        cached = self.pool.cached_blocks()
        if group_id == self.fa_group_id:
            return set(cached)
        swa = self.windows[self.window_group_ids.index(group_id)]
        return {block_hash for block_hash, block in cached.items() if swa.is_valid(block.block_id)}

    def is_used(self, group_id: int, block_id: int) -> bool:
        """True if a request holds that block of a KV cache group."""
        if group_id == self.fa_group_id:
            return self.pool.blocks[block_id].ref_cnt > 0
        return self.windows[self.window_group_ids.index(group_id)].is_block_used(block_id)

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Compare with all block tables; raises AssertionError naming what is wrong. O(blocks)."""
        self.pool.check_integrity(Counter(block.block_id for table in tables for block in table.blocks))
        for place, swa in enumerate(self.windows):
            held = [
                (block.block_id, block_id)
                for table in tables
                for block, block_id in zip(table.blocks, table.windows[place], strict=True)
                if block_id
            ]
            for fa_block_id, block_id in held:
                assert swa.block_id_of(fa_block_id) == block_id, f"FA block {fa_block_id} is kept in another block"
            swa.check_integrity(Counter(fa_block_id for fa_block_id, _ in held))

    def _last_swa_valid_idx(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Phase 1 of the matching: scan down, counting for each window the valid blocks without a gap."""
        last_swa_valid_idx = 0
        swa_valid_in_window = [0] * len(self.windows)
        windows = list(enumerate(self.windows))
        for index, block in enumerate(blocks, 1):
            is_endpoint = True
            for place, swa in windows:
                valid = swa_valid_in_window[place] = (
                    swa_valid_in_window[place] + 1 if swa.is_valid(block.block_id) else 0
                )
                is_endpoint = is_endpoint and valid >= swa.window_blocks
            if is_endpoint:
                last_swa_valid_idx = index
        return last_swa_valid_idx

    def _replace_poorer(self, before: KVCacheBlock, block: KVCacheBlock) -> list[int]:
        """Two blocks of one content: the first stays the one that is found, unless a window has lost its part of it.

        Returns:
            Groups in which the content could not be found, and can be now.
        """
        lost = [group_id for group_id, swa in self._windows_by_group() if not swa.is_valid(before.block_id)]
        if before is block or not lost or not all(swa.is_used(block.block_id) for swa in self.windows):
            return []
        self.pool.replace(before, block)
        for swa in self.windows:
            swa.forget_content(before.block_id)
            swa.fix_content(block.block_id)
        return lost

    def _windows_by_group(self) -> Iterable[tuple[int, SWACacheManager]]:
        return zip(self.window_group_ids, self.windows, strict=True)

    def _fa_block_evicted(self, block: KVCacheBlock) -> None:
        """The pool is about to hand out a block that can be found."""
        if self.fa_group_id is not None:
            self._removed(self.fa_group_id, block.block_id)
        for group_id, swa in self._windows_by_group():
            if swa.forget_content(block.block_id):
                self._removed(group_id, block.block_id)

    def _removed(self, group_id: int, fa_block_id: int) -> None:
        block_hash = self.pool.blocks[fa_block_id].block_hash
        if self._observer is not None and block_hash is not None:
            self._observer.block_removed(group_id, block_hash)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, one behind the last) of each run of neighbours in ascending numbers."""
    start = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[place - 1] + 1:
            yield indices[start], indices[place - 1] + 1
            start = place
