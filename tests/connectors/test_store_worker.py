"""The worker side over a store that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from ksana.connectors import store_saves
from ksana.connectors.block_store import BlockStore
from ksana.connectors.store_connector import StoreConnector
from ksana.connectors.store_metadata import StoreMetadata
from ksana.connectors.store_scheduler import StorePolicy
from ksana.testing.kv_connector_engine import ConnectorEngine, make_connector_cache
from ksana.testing.kv_connector_tests import connector_context


class HangingStore(BlockStore):
    """Finds nothing, and neither stores nor notes anything as long as it hangs."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.is_called = threading.Event()

    def contains(self, keys: Sequence[str]) -> int:
        return 0

    def get(self, keys: Sequence[str], buffers: object) -> list[bool]:
        return [False] * len(keys)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        if keys == ["a"]:
            self.goes_on.wait()
        return [False] * len(keys)

    def put(self, keys: Sequence[str], buffers: object) -> list[bool]:
        self.is_called.set()
        self.goes_on.wait()
        return [False] * len(keys)


@pytest.fixture
def store() -> HangingStore:
    return HangingStore()


@pytest.fixture
def engine(store: HangingStore) -> Iterator[ConnectorEngine]:
    kv = make_connector_cache([None])
    context = connector_context(kv)
    connector = StoreConnector(store, context.namespace, kv, StorePolicy("remote"), threads=1)
    engine = ConnectorEngine(connector, kv)
    yield engine
    store.goes_on.set()
    engine.close()


def test_steps_go_on_though_a_save_never_ends(
    store: HangingStore,
    engine: ConnectorEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A preemption waited half a minute for it and failed, and so did every step from then on."""
    monkeypatch.setattr(store_saves, "_CANCEL_TIMEOUT_S", 0.05)
    request = engine.request(range(20))
    engine.admit(request)
    engine.step(request)
    request.all_token_ids.append(1)
    engine.step(request)
    assert store.is_called.wait(20)
    engine.preempt(request)
    engine.step()
    engine.step()
    assert caplog.text.count("hangs") == 1


def test_what_waits_for_a_store_is_bounded(store: HangingStore, engine: ConnectorEngine) -> None:
    """Every request that ends has the store told which blocks it used."""
    for _ in range(1000):
        work = StoreMetadata(used_keys=["a"])
        engine.worker._transfers.hand_over(work)
        engine.worker.start_load_kv(work)
    assert engine.worker._threads.num_waiting <= 256
