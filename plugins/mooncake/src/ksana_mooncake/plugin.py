"""What Ksana finds through the entry point. Mooncake is loaded when a cache is to be shared, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.config.options import OptionRegistry
    from ksana.connectors.base import KVConnector
    from ksana.connectors.context import ConnectorContext
    from ksana.types.config import KsanaConfig

ksana_api = 1


@hookimpl
def ksana_addoption(options: OptionRegistry) -> None:
    """Add the options of the global cache."""
    from ksana_mooncake.options import add_options

    add_options(options)


@hookimpl
def ksana_configure(config: KsanaConfig) -> None:
    """Check the options against each other, and against the machine, if they matter."""
    from ksana_mooncake.options import GlobalCacheOptions, check_machine, is_wanted, warn_of_halves

    warn_of_halves(config)
    if is_wanted(config):
        check_machine(GlobalCacheOptions.of(config))


@hookimpl
def ksana_kv_connector_names(config: KsanaConfig) -> list[str] | None:
    """Ask for the connector if the options do."""
    from ksana_mooncake.options import CONNECTOR, is_wanted

    return [CONNECTOR] if is_wanted(config) and CONNECTOR not in config.kv_transfer.connectors else None


@hookimpl
def ksana_create_kv_connector(name: str, context: ConnectorContext) -> KVConnector | None:
    """Make the connector."""
    from ksana_mooncake.options import CONNECTOR

    if name != CONNECTOR:
        return None
    from ksana_mooncake.connector import GlobalCacheConnector

    return GlobalCacheConnector(context)
