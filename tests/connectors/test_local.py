"""The connectors to the host's memory and to its disk, and both together, pass the kit."""

from __future__ import annotations

import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from ksana.connectors.base import KVConnector
from ksana.connectors.context import ConnectorContext
from ksana.connectors.local import create_disk_connector, create_memory_connector
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.multi import MultiConnector
from ksana.connectors.store_connector import StoreConnector
from ksana.connectors.store_scheduler import StorePolicy
from ksana.errors import UsageError
from ksana.testing.kv_connector_engine import make_connector_cache
from ksana.testing.kv_connector_tests import KVConnectorTests, MakeConnector, connector_context
from ksana.types.config import CacheConfig, KsanaConfig, KVTransferConfig


def with_config(context: ConnectorContext, folder: Path) -> ConnectorContext:
    cache = CacheConfig(host_memory_factor=2.0)
    return replace(context, config=KsanaConfig(cache=cache, kv_transfer=KVTransferConfig(disk_path=str(folder))))


class TestLocal(KVConnectorTests):
    """The step waits for each layer's blocks as it comes to it."""

    shares_store = False
    can_swap = True

    @pytest.fixture
    def make_connector(self, tmp_path: Path) -> MakeConnector:
        return lambda context: create_memory_connector(with_config(context, tmp_path))

    def count_pins(self, connector: StoreConnector) -> int:
        return connector.store.num_pins

    def lose_blocks(self, connector: StoreConnector) -> None:
        connector.store.clear()


class TestSharedMemory(TestLocal):
    """Loads let others go on, and several engines use one store."""

    shares_store = True

    @pytest.fixture
    def make_connector(self) -> MakeConnector:
        store = MemoryStore(2**22, 1024)

        def make(context: ConnectorContext) -> KVConnector:
            return StoreConnector(store, context.namespace, context.kv, StorePolicy("host"), threads=3, batch_blocks=2)

        return make


class TestAllLayersAtOnce(TestLocal):
    """The step waits for all that is loaded before it computes anything."""

    shares_store = True

    @pytest.fixture
    def make_connector(self) -> MakeConnector:
        store, policy = MemoryStore(2**22, 1024), StorePolicy("host", max_sync_bytes=2**30)
        return lambda context: StoreConnector(store, context.namespace, context.kv, policy, threads=2)


class TestLocalDisk(KVConnectorTests):
    @pytest.fixture
    def make_connector(self, tmp_path: Path) -> MakeConnector:
        return lambda context: create_disk_connector(with_config(context, tmp_path))

    def lose_blocks(self, connector: StoreConnector) -> None:
        for path in connector.store._folder.iterdir():
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)


class TestMemoryAndDisk(KVConnectorTests):
    can_swap = True

    @pytest.fixture
    def make_connector(self, tmp_path: Path) -> MakeConnector:
        def make(context: ConnectorContext) -> KVConnector:
            context = with_config(context, tmp_path)
            self.memory = create_memory_connector(context)
            return MultiConnector([self.memory, create_disk_connector(context)])

        return make

    def count_pins(self, connector: KVConnector) -> int:
        return self.memory.store.num_pins


@pytest.mark.parametrize("path", ["~nobody-of-that-name/kv", ""])
def test_a_folder_without_a_home_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Containers run for users that no file knows."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    config = KsanaConfig(kv_transfer=KVTransferConfig(disk_path=path))
    with pytest.raises(UsageError, match=r"no KV cache on disk: .*home directory.*--kv-disk-path"):
        create_disk_connector(connector_context(make_connector_cache([None]), config))
