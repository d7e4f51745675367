"""The connector of any block store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.connectors.base import BlockTableView, KVConnector
from ksana.connectors.block_store import BlockNamespace, BlockStore
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.prefix_lookup import PrefixLookup
from ksana.connectors.store_scheduler import StorePolicy, StoreSchedulerConnector
from ksana.connectors.store_worker import StoreWorkerConnector
from ksana.connectors.swap_space import SwapSpace
from ksana.connectors.transfers import Transfers
from ksana.types.kv import KVCacheConfig

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache


class StoreConnector(KVConnector):
    """Keeps blocks in a store, and finds them again by their content.

    Args:
        store: where they are kept. If it is the host's memory, requests can be swapped out to it as well.
        namespace: of this engine's blocks.
        kv: blocks and groups of the cache.
        policy: what is loaded and saved.
        threads: that copy.
        batch_blocks: most blocks for one call of the store. Fewer are spread over the threads, and end sooner.
        by_layer: what a step waits for is loaded layer by layer, if the store is the host's memory: it computes the
            first ones meanwhile.
    """

    def __init__(
        self,
        store: BlockStore,
        namespace: BlockNamespace,
        kv: KVCacheConfig,
        policy: StorePolicy,
        *,
        threads: int,
        batch_blocks: int = 16,
        by_layer: bool = False,
    ) -> None:
        self.store = store
        self._namespace = namespace
        self._kv = kv
        self._policy = policy
        self._threads = threads
        self._batch_blocks = batch_blocks
        self._by_layer = by_layer
        self._transfers = Transfers()

    def create_scheduler(self, tables: BlockTableView) -> StoreSchedulerConnector:
        lookup = PrefixLookup(self.store, self._namespace, self._kv)
        swap = SwapSpace(self.store, self._kv) if isinstance(self.store, MemoryStore) else None
        return StoreSchedulerConnector(self.store, lookup, self._kv, tables, self._transfers, self._policy, swap)

    def create_worker(self, cache: KVCache) -> StoreWorkerConnector:
        return StoreWorkerConnector(
            self.store,
            cache,
            self._transfers,
            threads=self._threads,
            batch_blocks=self._batch_blocks,
            by_layer=self._by_layer,
        )
