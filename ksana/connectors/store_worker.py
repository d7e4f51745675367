"""The side of a block store's connector that copies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ksana.connectors.base import WorkerConnector
from ksana.connectors.block_store import BlockStore
from ksana.connectors.cache_views import CacheViews
from ksana.connectors.layerwise_loads import LayerwiseLoads
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_loads import StoreLoads
from ksana.connectors.store_metadata import StoreMetadata
from ksana.connectors.store_saves import StoreSaves
from ksana.connectors.transfer_threads import TransferThreads
from ksana.connectors.transfers import Transfers
from ksana.types.kv_transfer import ConnectorMetadata

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache

_USED_PRIORITY = 2
_MOST_WAITING_TASKS = 256
"""If there are more, the store is too slow to be told in what order blocks were used."""
_LEAST_WAITING_BLOCKS = 64
_STOP_TIMEOUT_S = 3.0


class StoreWorkerConnector(WorkerConnector):
    """Copies blocks between the cache and a store, on threads of its own.

    Loads come before saves. At most a quarter of the cache waits to be saved.

    Args:
        store: called on the threads; closed with this connector.
        cache: in the host's memory.
        transfers: shared with the scheduler side.
        threads: that copy.
        batch_blocks: most blocks for one call of the store.
        by_layer: synchronous loads go layer by layer with the computation, if the store is the host's memory.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: KVCache,
        transfers: Transfers,
        *,
        threads: int,
        batch_blocks: int,
        by_layer: bool,
    ) -> None:
        views = CacheViews(cache)
        groups = cache.config.groups
        self._store = store
        self._transfers = transfers
        self._threads = TransferThreads(threads, "ksana-kv")
        self._loads = StoreLoads(store, views, self._threads, batch_blocks)
        self._layerwise: LayerwiseLoads | None = None
        if by_layer and isinstance(store, MemoryStore):
            self._layerwise = LayerwiseLoads(store, views, self._threads, self._loads.note_lost)
        self._saves = StoreSaves(
            store,
            views,
            self._threads,
            transfers,
            batch_blocks=batch_blocks,
            max_waiting_blocks=max(cache.config.num_blocks // 4, _LEAST_WAITING_BLOCKS),
            window_groups=frozenset(i for i, group in enumerate(groups) if group.sliding_window is not None),
        )
        self._invalid: set[tuple[int, int]] = set()

    @property
    def is_layerwise(self) -> bool:
        return self._layerwise is not None and self._layerwise.is_active

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        for earlier in self._transfers.peek(meta):
            self._saves.cancel(earlier.preempted)

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        taken = self._transfers.take(meta)
        preempted: set[str] = set()
        for work in reversed(taken):  # so that what is preempted later is known
            self._start(work, preempted, is_present=work is meta)
            preempted |= work.preempted

    def wait_for_layer_load(self, layer_index: int) -> None:
        self._loads.wait_for_step()
        if self._layerwise is not None:
            self._layerwise.wait(layer_index)

    def get_finished(self) -> tuple[set[str], set[str]]:
        received, invalid = self._loads.take_ended()
        self._invalid |= invalid
        return self._transfers.take_ended(), received

    def get_invalid_blocks(self) -> set[tuple[int, int]]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        self._threads.stop(_STOP_TIMEOUT_S)
        self._store.close()

    def _start(self, work: StoreMetadata, preempted: set[str], *, is_present: bool) -> None:
        """Begin the transfers of a step, but for those of requests that have been preempted later."""
        for load in work.loads:
            if load.is_async or (is_present and self._layerwise is None):
                self._loads.start(load)
            elif is_present and self._layerwise is not None:
                self._layerwise.start(load)
            else:
                self._loads.skip(load)
        for save in work.saves:
            if save.request_id in preempted:
                self._saves.skip(save)
            else:
                self._saves.start(save)
        if work.used_keys and self._threads.num_waiting < _MOST_WAITING_TASKS:
            self._threads.submit(partial(self._store.touch, work.used_keys), priority=_USED_PRIORITY)
