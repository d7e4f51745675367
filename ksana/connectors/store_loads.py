"""Loads under way on the worker side of a store's connector."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ksana.connectors.block_store import BlockStore
from ksana.connectors.cache_views import CacheViews
from ksana.connectors.store_metadata import BlockList, Load
from ksana.connectors.transfer_threads import TransferThreads
from ksana.types.kv import cdiv

_PRIORITY = 0
_SYNC_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Loading:
    load: Load
    num_batches: int
    is_over: threading.Event = field(default_factory=threading.Event)


class StoreLoads:
    """Copies blocks from a store into the cache, in batches, on threads.

    A block that is not there, or for which the store raises, is invalid.
    """

    def __init__(self, store: BlockStore, views: CacheViews, threads: TransferThreads, batch_blocks: int) -> None:
        self._store = store
        self._views = views
        self._threads = threads
        self._batch_blocks = batch_blocks
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._invalid: set[tuple[int, int]] = set()
        self._in_step: list[_Loading] = []

    def start(self, load: Load) -> None:
        """Begin a load."""
        shared_out = cdiv(len(load.blocks), self._threads.count)  # every thread gets a part
        batches = list(load.blocks.batches(max(1, min(self._batch_blocks, shared_out))))
        loading = _Loading(load, len(batches))
        if not load.is_async:
            self._in_step.append(loading)
        if not batches:
            self._end(loading)
        for batch in batches:
            self._threads.submit(partial(self._load, loading, batch), priority=_PRIORITY)

    def note_lost(self, blocks: BlockList) -> None:
        """Blocks have not come."""
        with self._lock:
            self._invalid.update(zip(blocks.group_ids, blocks.block_ids, strict=True))

    def skip(self, load: Load) -> None:
        """A load for a step that has not been executed: whoever waited for it has ended."""
        self._store.unpin(load.pinned)

    def wait_for_step(self) -> None:
        """Wait for the synchronous loads of the present step.

        Raises:
            RuntimeError: the store does not answer.
        """
        waiting, self._in_step = self._in_step, []
        for loading in waiting:
            if not loading.is_over.wait(_SYNC_TIMEOUT_S):
                raise RuntimeError(f"blocks have not been loaded for {_SYNC_TIMEOUT_S:.0f} s")

    def take_ended(self) -> tuple[set[str], set[tuple[int, int]]]:
        """Requests whose asynchronous load has ended, and (group, block) of what could not be loaded."""
        if not self._received and not self._invalid:
            return set(), set()
        with self._lock:
            received, self._received = self._received, set()
            invalid, self._invalid = self._invalid, set()
        return received, invalid

    def _load(self, loading: _Loading, batch: BlockList) -> None:
        arrived: Sequence[bool] = [False] * len(batch)
        try:
            arrived = self._store.get(batch.keys, self._views.buffers(batch))
        finally:
            lost = [not has_arrived for has_arrived in arrived]
            if any(lost):
                self.note_lost(batch.select(lost))
            with self._lock:
                loading.num_batches -= 1
                is_last = loading.num_batches == 0
            if is_last:
                self._end(loading)

    def _end(self, loading: _Loading) -> None:
        self._store.unpin(loading.load.pinned)
        if loading.load.is_async:
            with self._lock:
                self._received.add(loading.load.request_id)
        loading.is_over.set()
