"""The connector passes the kit, on both backends."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ksana.connectors.context import ConnectorContext
from ksana.testing.kv_connector_tests import KVConnectorTests, MakeConnector
from ksana.testing.waiting import wait_until
from ksana.types.config import CacheConfig, KsanaConfig
from ksana_mooncake.client import StoreClient
from ksana_mooncake.connector import GlobalCacheConnector
from ksana_mooncake.options import GlobalCacheOptions

MakeConfig = Callable[..., KsanaConfig]


class TestMock(KVConnectorTests):
    @pytest.fixture
    def values(self, own_mock: GlobalCacheOptions) -> dict[str, object]:
        return {"backend_type": "mooncake-mock", "master_server_addr": str(own_mock.master)}

    @pytest.fixture
    def create_client(self) -> Callable[[], StoreClient] | None:
        return None

    @pytest.fixture
    def make_connector(
        self,
        make_config: MakeConfig,
        values: dict[str, object],
        create_client: Callable[[], StoreClient] | None,
    ) -> MakeConnector:
        test = uuid.uuid4().hex

        def make(context: ConnectorContext) -> GlobalCacheConnector:
            namespace = replace(context.namespace, model=context.namespace.model + test)
            context = replace(context, config=make_config(**values), namespace=namespace)
            connector = GlobalCacheConnector(context, create_client)
            wait_until(lambda: connector.store.is_up)
            return connector

        return make

    def lose_blocks(self, connector: GlobalCacheConnector) -> None:
        connector.store._remove()


class TestMooncake(TestMock):
    """Here blocks are read in place; the mock's come by way of a buffer."""

    @pytest.fixture
    def values(self, real_master: GlobalCacheOptions) -> dict[str, object]:
        return {"master_server_addr": str(real_master.master), "zero_copy": "always"}

    @pytest.fixture
    def create_client(
        self, lasting_client: Callable[..., StoreClient], real_master: GlobalCacheOptions
    ) -> Callable[[], StoreClient]:
        return lambda: lasting_client(real_master, 0)


@pytest.mark.parametrize(
    ("role", "caching", "loads", "saves"),
    [("", True, True, True), ("prefill", True, False, True), ("decode", True, True, False), ("", False, False, False)],
)
def test_the_role_says_what_is_loaded_and_saved(
    make_config: MakeConfig, own_mock: GlobalCacheOptions, role: str, caching: bool, loads: bool, saves: bool
) -> None:
    from ksana.testing.kv_connector_engine import make_connector_cache
    from ksana.testing.kv_connector_tests import connector_context

    values: dict[str, Any] = {"backend_type": "mooncake-mock", "master_server_addr": str(own_mock.master), "role": role}
    config = make_config(**values).model_copy(update={"cache": CacheConfig(enable_prefix_caching=caching)})
    connector = GlobalCacheConnector(connector_context(make_connector_cache([None]), config))
    assert (connector._policy.loads, connector._policy.saves) == (loads, saves)
    connector.store.close()
