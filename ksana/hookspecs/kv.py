"""Hooks through which KV connectors and publishers of KV cache events join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from ksana.connectors.base import KVConnector
    from ksana.connectors.context import ConnectorContext
    from ksana.kv_events.log import EventLog
    from ksana.kv_events.publisher import KVEventPublisher
    from ksana.types.config import KsanaConfig, KVEventsConfig


@hookspec
def ksana_kv_connector_names(config: KsanaConfig) -> list[str] | None:
    """Name connectors of yours that your own options ask for, beside those of ``--kv-connector``; None for none.

    When: once an engine at start, before the connectors are made. Not firstresult: the names of all plugins are made,
    nearest first as far as they are configured, these last. Raise :class:`ksana.errors.UsageError` if your options
    cannot work.

    Example::

        @hookimpl
        def ksana_kv_connector_names(config):
            return ["mine"] if config.plugin_options["mine"]["address"] else None
    """


@hookspec(firstresult=True)
def ksana_create_kv_connector(name: str, context: ConnectorContext) -> KVConnector | None:
    """Create the KV connector of that name, or return None if the name is not yours.

    When: once an engine and name at start, after the cache is laid out and before it is allocated. Firstresult. Connect
    to nothing here that may be slow to answer: a connector comes up in the background, and until then finds nothing.
    Raise :class:`ksana.errors.UsageError` if your part of the configuration cannot work.

    Example::

        @hookimpl
        def ksana_create_kv_connector(name, context):
            if name == "mine":
                return MyConnector(context.namespace, context.kv)
    """


@hookspec(firstresult=True)
def ksana_create_kv_event_publisher(config: KVEventsConfig, log: EventLog) -> KVEventPublisher | None:
    """Create and start the publisher that ``config.publisher`` names, or return None if the name is not yours.

    When: once an engine at start, if KV events are asked for, before the model is loaded. Firstresult. The publisher
    reads ``log`` on a thread of its own, where a server that cannot be reached may be waited for. Raise
    :class:`ksana.errors.UsageError` if your part of the configuration cannot work.

    Example::

        @hookimpl
        def ksana_create_kv_event_publisher(config, log):
            if config.publisher == "mine":
                return MyPublisher(config.endpoint, log)
    """
