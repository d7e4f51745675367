"""Saves under way on the worker side of a store's connector."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ksana.connectors.block_store import BlockStore
from ksana.connectors.cache_views import CacheViews
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_metadata import BlockList, Save
from ksana.connectors.transfer_threads import TransferThreads
from ksana.connectors.transfers import Transfers

logger = logging.getLogger(__name__)

_PRIORITY = 1
_CANCEL_TIMEOUT_S = 10.0

_Batch = tuple[int, Callable[[], object]]
"""Number of blocks, and what copies them."""


@dataclass(slots=True, eq=False)
class _Saving:
    """A save, and how far it is.

    Attributes:
        num_left: batches that have not ended.
        num_running: batches that read blocks just now.
    """

    request_id: str
    num_left: int
    num_running: int = 0
    is_cancelled: bool = False


class StoreSaves:
    """Copies blocks from the cache to a store, in batches, on threads.

    If the store is slower than the engine, blocks are left out: what waits is bounded, and nobody waits for it.

    Args:
        transfers: hears of every save's end.
        batch_blocks: most blocks for one call of the store.
        max_waiting_blocks: most blocks of saves that have not ended. Blocks that are swapped out are not counted.
        window_groups: groups in which a running request gives blocks back: those are copied at once.

    Attributes:
        num_dropped: blocks that were left out.
    """

    def __init__(
        self,
        store: BlockStore,
        views: CacheViews,
        threads: TransferThreads,
        transfers: Transfers,
        *,
        batch_blocks: int,
        max_waiting_blocks: int,
        window_groups: frozenset[int],
    ) -> None:
        self._store = store
        self._views = views
        self._threads = threads
        self._transfers = transfers
        self._batch_blocks = batch_blocks
        self._max_waiting_blocks = max_waiting_blocks
        self._window_groups = window_groups
        self._changed = threading.Condition()
        self._savings: dict[str, list[_Saving]] = {}
        self._num_waiting = 0
        self.num_dropped = 0

    def start(self, save: Save) -> None:
        """Begin a save."""
        batches = self._swap_batches(save.blocks) if save.is_swap else self._content_batches(save.blocks)
        if not batches:
            self._transfers.end_save(save.request_id)
            return
        saving = _Saving(save.request_id, len(batches))
        with self._changed:
            self._savings.setdefault(save.request_id, []).append(saving)
            self._num_waiting += sum(count for count, _ in batches)
        for count, copy in batches:
            self._threads.submit(partial(self._run, saving, count, copy), priority=_PRIORITY)

    def skip(self, save: Save) -> None:
        """A save of a request that has lost its blocks before it began."""
        self._transfers.end_save(save.request_id)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End all reading of the requests' blocks; waits for what is under way, but not for ever.

        A store that hangs may then read what others write: see :meth:`BlockStore.put`.
        """
        with self._changed:
            cancelled = [saving for request_id in request_ids for saving in self._savings.get(request_id, ())]
            for saving in cancelled:
                saving.is_cancelled = True
            if not self._changed.wait_for(lambda: not any(s.num_running for s in cancelled), _CANCEL_TIMEOUT_S):
                logger.warning("a store of KV blocks hangs: the step goes on after %.0f s", _CANCEL_TIMEOUT_S)

    def _swap_batches(self, blocks: BlockList) -> list[_Batch]:
        return [(0, partial(self._fill, batch)) for batch in blocks.batches(self._batch_blocks)]

    def _content_batches(self, blocks: BlockList) -> list[_Batch]:
        blocks = self._within_bound(blocks)
        is_window = [group_id in self._window_groups for group_id in blocks.group_ids]
        copied = blocks.select(is_window)
        lasting = blocks.select([not is_copied for is_copied in is_window]) if len(copied) else blocks
        return [
            (len(batch), partial(self._store.put, batch.keys, self._views.copies(batch)))
            for batch in copied.batches(self._batch_blocks)
        ] + [(len(batch), partial(self._put, batch)) for batch in lasting.batches(self._batch_blocks)]

    def _within_bound(self, blocks: BlockList) -> BlockList:
        """The first of the blocks, as many as may wait: without them the others would be found by nobody."""
        room = self._max_waiting_blocks - self._num_waiting
        if len(blocks) <= room:
            return blocks
        if not self.num_dropped:
            logger.warning("a store of KV blocks is slower than the engine: some blocks are not saved (said once)")
        self.num_dropped += len(blocks) - room
        return blocks[:room]

    def _run(self, saving: _Saving, count: int, copy: Callable[[], object]) -> None:
        with self._changed:
            may_run = not saving.is_cancelled
            saving.num_running += may_run
        try:
            if may_run:
                copy()
        finally:
            with self._changed:
                saving.num_running -= may_run
                saving.num_left -= 1
                self._num_waiting -= count
                if saving.num_left == 0:
                    self._forget(saving)
                self._changed.notify_all()

    def _forget(self, saving: _Saving) -> None:
        savings = self._savings[saving.request_id]
        savings.remove(saving)
        if not savings:
            del self._savings[saving.request_id]
        self._transfers.end_save(saving.request_id)

    def _put(self, blocks: BlockList) -> None:
        is_new = [not is_stored for is_stored in self._store.touch(blocks.keys)]
        if not all(is_new):
            blocks = blocks.select(is_new)
        if len(blocks):
            self._store.put(blocks.keys, self._views.buffers(blocks))

    def _fill(self, blocks: BlockList) -> None:
        assert isinstance(self._store, MemoryStore), "only the host's memory has room for swapped requests"
        self._store.fill(blocks.keys, self._views.buffers(blocks))
