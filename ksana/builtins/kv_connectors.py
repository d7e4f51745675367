"""Builtin plugin: KV connectors to the host's memory and to its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.connectors.base import KVConnector
    from ksana.connectors.context import ConnectorContext


@hookimpl(trylast=True)
def ksana_create_kv_connector(name: str, context: ConnectorContext) -> KVConnector | None:
    """Create the connectors ``local`` and ``local_disk``."""
    if name == "local":
        from ksana.connectors.local import create_memory_connector

        return create_memory_connector(context)
    if name == "local_disk":
        from ksana.connectors.local import create_disk_connector

        return create_disk_connector(context)
    return None
