"""The connector: the generic one of a block store, over Mooncake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ksana.connectors.context import ConnectorContext
from ksana.connectors.store_connector import StoreConnector
from ksana.connectors.store_scheduler import StorePolicy
from ksana.connectors.store_worker import StoreWorkerConnector
from ksana_mooncake.client import StoreClient
from ksana_mooncake.master import LocalMaster, find_master
from ksana_mooncake.options import GlobalCacheOptions
from ksana_mooncake.store import MooncakeStore

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache


class GlobalCacheConnector(StoreConnector):
    """Finds the blocks of prompts that any server of a Mooncake Store has computed, and shares those computed here.

    Args:
        context: of the engine.
        create_client: makes clients of the store instead of those that the options name.

    Raises:
        UsageError: the options contradict each other, or Mooncake is not installed.
    """

    store: MooncakeStore

    def __init__(self, context: ConnectorContext, create_client: Callable[[], StoreClient] | None = None) -> None:
        options = GlobalCacheOptions.of(context.config)
        store = MooncakeStore(
            options,
            create_client or client_maker(options),
            block_bytes=max(group.bytes_per_block for group in context.kv.groups),
            key_prefix=context.namespace.prefix,
            master=LocalMaster(find_master(options.master_bin), options.master) if options.starts_master else None,
        )
        is_caching = context.config.cache.enable_prefix_caching
        policy = StorePolicy("remote", loads=is_caching and options.loads, saves=is_caching and options.saves)
        super().__init__(store, context.namespace, context.kv, policy, threads=options.fetch_thread_num)

    def create_worker(self, cache: KVCache) -> StoreWorkerConnector:
        worker = super().create_worker(cache)
        for group_id in range(len(cache.config.groups)):
            for tensor in cache.group_tensors(group_id):
                self.store.register(tensor.data_ptr(), tensor.nbytes)
        return worker


def client_maker(options: GlobalCacheOptions) -> Callable[[], StoreClient]:
    """What makes clients of the backend.

    Raises:
        UsageError: Mooncake is not installed, or does not work on this machine.
    """
    if options.backend == "mooncake-mock":
        from ksana_mooncake.mock_client import MockClient

        return partial(MockClient, options)
    from ksana_mooncake.mooncake_client import MooncakeClient, load_library

    load_library(options.timeout_s)
    return partial(MooncakeClient, options)
