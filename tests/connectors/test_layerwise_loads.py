"""Loads that a step overtakes: what has not come is known before anybody draws a token from it."""

from __future__ import annotations

import pytest

from ksana.connectors.local import create_memory_connector
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_connector import StoreConnector
from ksana.testing.kv_connector_engine import ConnectorEngine, make_connector_cache
from ksana.testing.kv_connector_tests import connector_context
from ksana.types.config import CacheConfig, KsanaConfig
from ksana.types.request import Request


@pytest.fixture
def engine() -> ConnectorEngine:
    """With one stored prompt of six blocks."""
    kv = make_connector_cache([None])
    config = KsanaConfig(cache=CacheConfig(host_memory_factor=2.0))
    engine = ConnectorEngine(create_memory_connector(connector_context(kv, config)), kv)
    engine.run(engine.request(range(25)))
    engine.overwrite_free_blocks()
    return engine


def store_of(engine: ConnectorEngine) -> MemoryStore:
    connector = engine.connector
    assert isinstance(connector, StoreConnector)
    assert isinstance(connector.store, MemoryStore)
    return connector.store


def admit(engine: ConnectorEngine) -> Request:
    request = engine.request(range(25))
    engine.admit(request, engine.lookup(request))
    return request


def test_a_block_that_could_not_be_pinned_is_lost(engine: ConnectorEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was evicted between lookup and admission, and stored again since: it can be evicted while it is copied."""
    monkeypatch.setattr(store_of(engine), "pin", lambda keys: [])
    request = admit(engine)
    engine.step()
    assert {block for _, block in engine.invalid} == set(engine.kept_block_ids(request.request_id)[0][:6])
    engine.close()


def test_blocks_that_cannot_be_copied_are_lost(
    engine: ConnectorEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(store_of(engine), "read_layer", fail)
    request = admit(engine)
    engine.step()
    assert engine.wrong_blocks(request, 24) == engine.invalid
    engine.close()
    assert store_of(engine).num_pins == 0
    assert "planted" in caplog.text
