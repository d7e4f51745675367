"""Loading a prefix from elsewhere into a request's blocks, while other requests go on (remote cache loading)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ksana.kv.block_table import BlockTable
from ksana.kv.prefix_cache import PrefixCache, PrefixHit
from ksana.types.kv import cdiv
from ksana.types.request import Request
from ksana.types.step import BlockIds


class RemoteLoadingError(RuntimeError):
    """A call that the state of a request's loading does not allow: an error of the caller. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """What a request has of its prefix before anything is loaded.

    Attributes:
        fa_block_num: full-attention blocks.
        swa_block_num: blocks of sliding windows, over all windows.
    """

    fa_block_num: int
    swa_block_num: int


class RemoteCacheLoading:
    """The states of requests whose prefix is being loaded; they are kept in their :class:`BlockTable`.

    In this order: :meth:`get_request_prefix_block_number_before_remote_cache_loading` (``is_remote_loading``),
    :meth:`allocate_blocks_for_remote_cache` (``is_remote_loading_block_allocated``), the transfer, which is the
    caller's affair, :meth:`confirm_remote_cache_loading_result` (neither). Meanwhile nobody finds the new blocks or
    evicts any of the request's, and :class:`KVCacheManager` refuses to ``admit``, ``grow``, ``commit`` or ``fork`` it
    (the original: ``AllocateRequestBlocks``, ``UpdateRequestTokens``, ``AppendFilledCachedBlock``). :meth:`cancel`
    and ``KVCacheManager.free`` leave every state.

    Args:
        cache: where blocks come from.
        tables: of all requests; shared with the manager.
        block_size: tokens per block.
        register: makes the first so many blocks of a request findable.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tables: dict[str, BlockTable],
        block_size: int,
        register: Callable[[Request, BlockTable, int], None],
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._block_size = block_size
        self._register = register
        self._num_set_aside = 0

    def is_remote_loading(self, request: Request) -> bool:
        """True between the first call and the confirmation or the end of the request."""
        table = self._tables.get(request.request_id)
        return table is not None and table.is_remote_loading

    def num_swa_blocks_for(self, num_tokens: int) -> int:
        """Blocks of sliding windows, over all windows, that a request of ``num_tokens`` computed tokens holds.

        Args:
            num_tokens: from the start of the sequence, the cached prefix included.
        """
        total = cdiv(num_tokens, self._block_size)
        return sum(total - start for start in self._window_starts(num_tokens // self._block_size))

    def get_request_prefix_block_number_before_remote_cache_loading(
        self, request: Request, hit: PrefixHit
    ) -> RemotePrefix:
        """Begin: the request takes the prefix ``hit`` over (``GetRequestPrefixBlockNumberBeforeRemoteCacheLoading``).

        Raises:
            RemoteLoadingError: the request has blocks already.
        """
        if request.request_id in self._tables:
            raise RemoteLoadingError(f"{request.request_id}: loading begins before a request has blocks")
        table = self._tables[request.request_id] = BlockTable(self._cache, hit.blocks)
        table.is_remote_loading = True
        table.capacity = -1
        return RemotePrefix(len(table.blocks), sum(len(w) - w.count(0) for w in table.windows))

    def allocate_blocks_for_remote_cache(
        self, request: Request, fa_block_num: int, swa_block_num: int
    ) -> BlockIds | None:
        """Allocate the blocks to load (``AllocateBlocksForRemoteCache``).

        Args:
            fa_block_num: full-attention blocks behind the prefix.
            swa_block_num: blocks of sliding windows up to the end of the last of these; what
                :meth:`num_swa_blocks_for` says of the tokens that are loaded, which need not fill the last block.

        Returns:
            The request's whole block table, holes as 0; None, with nothing changed, if there are too few free blocks.

        Raises:
            RemoteLoadingError: loading has not begun, the blocks have been allocated, or the numbers do not match.
        """
        table = self._loading(request)
        if table.is_remote_loading_block_allocated:
            raise RemoteLoadingError(f"{request.request_id}: the blocks to load have been allocated already")
        first = len(table.blocks)
        total = first + fa_block_num
        starts = self._window_starts_by_count(total, swa_block_num)
        if fa_block_num > self._cache.pool.num_free_blocks:
            return None
        for swa, start in zip(self._cache.windows, starts, strict=True):
            if total - max(first, start) > swa.num_free_blocks:
                return None
        table.extend(total, starts)
        table.is_remote_loading_block_allocated = True
        return table.block_ids()

    def remote_swa_blocks(self, request: Request) -> list[tuple[int, int]]:
        """(KV cache group, block id) of the sliding windows' blocks that are loaded, window after window.

        Raises:
            RemoteLoadingError: they have not been allocated.
        """
        table = self._allocated(request)
        groups = self._cache.window_group_ids
        return [(groups[place], table.windows[place][index]) for place, index in _remote_places(table)]

    def confirm_remote_cache_loading_result(
        self,
        request: Request,
        matched_block_index: int,
        matched_remote_swa_block_indexs: Iterable[int],
        reserved_block_num: int,
    ) -> int:
        """End: blocks that have arrived become part of the request (``ConfirmRemoteCacheLoadingResult``).

        They become findable. The others are given back, as are those that windows need not hold. What counts is the
        furthest end that windows can go on from: for each, the last W_blocks blocks before it must be there.

        Args:
            matched_block_index: the first block of the request whose full-attention part has not arrived.
            matched_remote_swa_block_indexs: which of :meth:`remote_swa_blocks` have arrived, by their place there.
            reserved_block_num: blocks behind that end which the request keeps, for what it will compute. They are not
                findable; what they hold, if anything, is the caller's affair. Less, where a window has no block.

        Returns:
            Tokens, from the start, that need not be computed: a multiple of the block size, not less than the prefix
            that was taken over in the beginning.

        Raises:
            RemoteLoadingError: no blocks have been allocated, or an index is out of range.
        """
        table = self._allocated(request)
        prefix, total, places = table.num_registered, len(table.blocks), _remote_places(table)
        indices = set(matched_remote_swa_block_indexs)
        if not prefix <= matched_block_index <= total or not indices <= set(range(len(places))):
            raise RemoteLoadingError(
                f"{request.request_id}: {matched_block_index} blocks and SWA blocks {sorted(indices)} have arrived, of "
                f"blocks {prefix} to {total} and {len(places)} SWA blocks"
            )
        lacking = {place for number, place in enumerate(places) if number not in indices}
        end = self._furthest_end(table, matched_block_index, lacking)
        table.truncate(self._kept_until(table, end, reserved_block_num))
        for place, index in lacking:
            if index < end:
                table.drop_from_window(place, index)
        self._register(request, table, end)
        table.drop_behind_windows(end)
        table.is_remote_loading = table.is_remote_loading_block_allocated = False
        table.capacity = len(table.blocks) * self._block_size
        return end * self._block_size

    def cancel(self, request: Request) -> None:
        """Give back all blocks of a request that is loading. The caller has made sure that nobody writes there.

        Raises:
            RemoteLoadingError: it is not loading.
        """
        self._loading(request).truncate(0)
        del self._tables[request.request_id]

    def set_aside(self, request: Request) -> str:
        """Take a request's blocks away without giving them back: it is no longer loading, but somebody may still write.

        Returns:
            What :meth:`release` needs to give them back.

        Raises:
            RemoteLoadingError: the request is not loading.
        """
        table = self._loading(request)
        self._num_set_aside += 1
        name = f"{request.request_id} (set aside, {self._num_set_aside})"
        self._tables[name] = table
        del self._tables[request.request_id]
        return name

    def release(self, name: str) -> None:
        """Give back blocks that were set aside."""
        self._tables.pop(name).truncate(0)

    def _loading(self, request: Request) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None or not table.is_remote_loading:
            raise RemoteLoadingError(f"{request.request_id} is not loading")
        return table

    def _allocated(self, request: Request) -> BlockTable:
        table = self._loading(request)
        if not table.is_remote_loading_block_allocated:
            raise RemoteLoadingError(f"{request.request_id}: no blocks to load have been allocated")
        return table

    def _window_starts(self, num_full: int) -> list[int]:
        """First block that each window holds when ``num_full`` blocks are full."""
        return [max(0, num_full - swa.window_blocks) for swa in self._cache.windows]

    def _window_starts_by_count(self, num_blocks: int, swa_block_num: int) -> list[int]:
        """The same, of the ``num_blocks`` blocks the last of which may be filled in part: the count tells."""
        for num_full in (num_blocks, num_blocks - 1):
            starts = self._window_starts(num_full)
            if sum(num_blocks - start for start in starts) == swa_block_num:
                return starts
        raise RemoteLoadingError(f"{swa_block_num} SWA blocks are not what the windows hold of {num_blocks} blocks")

    def _furthest_end(self, table: BlockTable, matched: int, lacking: set[tuple[int, int]]) -> int:
        """The furthest end, of the local prefix or behind it, before which each window has its last W_blocks blocks.

        Or all blocks, if they are fewer: what was swapped out comes back whole, however short it is.
        """
        end = table.num_registered
        if not self._cache.windows:
            return matched
        held = [0] * len(table.windows)
        for index in range(min(table.window_starts), matched):
            for place, window in enumerate(table.windows):
                held[place] = held[place] + 1 if window[index] and (place, index) not in lacking else 0
            wanted = (min(index + 1, swa.window_blocks) for swa in self._cache.windows)
            if index >= table.num_registered and all(map(operator.ge, held, wanted)):
                end = index + 1
        return end

    def _kept_until(self, table: BlockTable, end: int, reserved: int) -> int:
        last = min(end + reserved, len(table.blocks))
        while end < last and all(window[end] for window in table.windows):
            end += 1
        return end


def _remote_places(table: BlockTable) -> list[tuple[int, int]]:
    """(window, block) of all blocks that windows have behind the prefix that was taken over."""
    return [
        (place, index)
        for place, window in enumerate(table.windows)
        for index in range(table.num_registered, len(window))
        if window[index]
    ]
