"""The connectors that need nothing but this machine: its memory and its disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ksana.connectors.context import ConnectorContext
from ksana.connectors.disk_store import DiskStore
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_connector import StoreConnector
from ksana.connectors.store_scheduler import StorePolicy
from ksana.errors import UsageError

logger = logging.getLogger(__name__)

_MAX_SYNC_BYTES = 64 * 2**20
"""Copied in less time than it takes to give a step away and come back."""

_MEMORY_BATCH_BLOCKS = 64
"""Blocks for one call: copying many at once leaves the interpreter to others."""


def create_memory_connector(context: ConnectorContext) -> StoreConnector:
    """Host blocks behind the cache.

    Raises:
        UsageError: there is no room for them.
    """
    cache = context.config.cache
    wanted = int(context.kv.num_bytes * cache.host_memory_factor)
    capacity = min(wanted, cache.host_max_bytes) if cache.host_max_bytes else wanted
    _check_memory(capacity)
    largest = max(group.bytes_per_block for group in context.kv.groups)
    if capacity < largest:
        raise UsageError(
            f"host blocks of {capacity / 2**20:.1f} MiB hold none of {largest / 2**20:.1f} MiB; raise "
            "--host-memory-factor or --host-memory-max-bytes"
        )
    logger.info("host blocks: %.0f MiB", capacity / 2**20)
    store = MemoryStore(capacity, max(group.spec.bytes_per_block for group in context.kv.groups))
    policy = _policy(context, "host", max_sync_bytes=_MAX_SYNC_BYTES)
    return StoreConnector(
        store,
        context.namespace,
        context.kv,
        policy,
        threads=cache.swap_threads,
        batch_blocks=_MEMORY_BATCH_BLOCKS,
        by_layer=True,
    )


def create_disk_connector(context: ConnectorContext) -> StoreConnector:
    """Files behind the cache. Raises UsageError if they cannot be written."""
    transfer = context.config.kv_transfer
    try:
        folder = Path(transfer.disk_path).expanduser() if transfer.disk_path else default_folder()
    except RuntimeError as error:
        raise UsageError(f"no KV cache on disk: {error}; say where with --kv-disk-path") from None
    store = DiskStore(folder, transfer.disk_max_bytes, context.namespace.prefix)
    logger.info("KV cache on disk: %s, up to %.0f MiB", folder, transfer.disk_max_bytes / 2**20)
    threads = context.config.cache.swap_threads
    return StoreConnector(store, context.namespace, context.kv, _policy(context, "disk"), threads=threads)


def default_folder() -> Path:
    """Where blocks lie if nobody says otherwise: in the user's cache, as the XDG specification has it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "ksana" / "kv"


def _policy(context: ConnectorContext, tier: str, *, max_sync_bytes: int = 0) -> StorePolicy:
    is_wanted = context.config.cache.enable_prefix_caching
    return StorePolicy(tier, loads=is_wanted, saves=is_wanted, max_sync_bytes=max_sync_bytes)


def _check_memory(capacity: int) -> None:
    from ksana.kernels.cpu.machine import available_memory

    if capacity > (available := available_memory()):
        raise UsageError(
            f"host blocks of {capacity / 2**20:.0f} MiB do not fit the free memory of {available / 2**20:.0f} MiB; "
            "lower --host-memory-factor or set --host-memory-max-bytes"
        )
