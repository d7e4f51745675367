"""The client of the real Mooncake Store."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ksana.errors import UsageError
from ksana_mooncake.addresses import Address, parse_endpoint
from ksana_mooncake.client import EXISTS, OK, Addresses, Sizes
from ksana_mooncake.options import GlobalCacheOptions

_PROBE_TIMEOUT_S = 1.0
_INTERNAL_BUFFER = 1 << 20
"""Bytes that Mooncake keeps for calls that we do not use."""


def load_library(timeout_s: float) -> Any:
    """Import Mooncake's store, told by its variables that nothing may take longer than ``timeout_s``.

    What the operator has put into these variables stays. They are read once a process.

    Raises:
        UsageError: it is not installed, or does not work on this machine.
    """
    seconds = str(math.ceil(timeout_s))
    variables = {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # a batch that is longer than the queue fails in part
        "MC_RPC_TIMEOUT_MS": str(round(timeout_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(round(min(timeout_s, _PROBE_TIMEOUT_S) * 1000)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TRANSFER_TIMEOUT": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_LOG_LEVEL": "ERROR",  # it writes to stderr, many lines for what we log as one
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store
    except ImportError as error:
        raise UsageError(_import_advice(error)) from error
    return store


def _import_advice(error: ImportError) -> str:
    if error.name == "mooncake":
        return (
            "the global cache needs Mooncake: pip install 'ksana-mooncake[non-cuda]', "
            "or [cuda] on a machine with CUDA; never both"
        )
    return f"Mooncake does not work on this machine: {error}; libibverbs.so.1 is in Debian's package libibverbs1"


class MooncakeClient:
    """A client, in the process, of a Mooncake Store."""

    def __init__(self, options: GlobalCacheOptions) -> None:
        self._options = options
        self._library = load_library(options.timeout_s)
        self._store = self._library.MooncakeDistributedStore()
        self._placement = self._library.ReplicateConfig()

    def is_reachable(self) -> bool:
        # Mooncake takes four seconds to find out that nobody is there. While it connects or leaves, it holds the
        # interpreter's lock for all of them.
        return self._answers(self._options.master)

    def connect(self) -> int:
        options = self._options
        if not self.is_reachable():
            raise ConnectionError("its master does not answer")
        metadata_server = parse_endpoint(options.metadata_server)
        if metadata_server is not None and not self._answers(metadata_server):
            raise ConnectionError(f"nobody answers at {metadata_server}, where --mooncake-service-endpoint points")
        code: int = self._store.setup(
            options.master.local_host(),
            options.metadata_server,
            options.global_segment_size,
            _INTERNAL_BUFFER,
            options.protocol,
            options.rdma_devices,
            str(options.master),
        )
        if code == OK and options.global_segment_size:
            # Storing costs no more than a copy then, and lasts as long as we do.
            self._placement.preferred_segment = self._store.get_hostname()
        return code

    def register(self, address: int, size: int) -> int:
        code: int = self._store.register_buffer(address, size)
        return code

    def exists(self, keys: Sequence[str]) -> list[int]:
        codes: list[int] = self._store.batch_is_exist(list(keys))
        return codes

    def put(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        codes = self._store.batch_put_from_multi_buffers(list(keys), addresses, sizes, self._placement)
        return [OK if code == EXISTS else code for code in codes]

    def get(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        codes: list[int] = self._store.batch_get_into_multi_buffers(list(keys), addresses, sizes)
        return codes

    def remove(self, pattern: str) -> int:
        count: int = self._store.remove_by_regex(pattern, True)
        return count

    def close(self) -> None:
        self._store.close()

    def _answers(self, address: Address) -> bool:
        return address.answers(min(self._options.timeout_s, _PROBE_TIMEOUT_S))
