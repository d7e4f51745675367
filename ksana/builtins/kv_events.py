"""Builtin plugin: publishers of KV cache events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.kv_events.log import EventLog
    from ksana.kv_events.publisher import KVEventPublisher
    from ksana.types.config import KVEventsConfig


@hookimpl(trylast=True)
def ksana_create_kv_event_publisher(config: KVEventsConfig, log: EventLog) -> KVEventPublisher | None:
    """Create the publishers ``zmq`` and ``nats``."""
    try:
        if config.publisher == "zmq":
            from ksana.kv_events.transports.zmq_publisher import ZmqPublisher

            return ZmqPublisher(config, log)
        if config.publisher == "nats":
            from ksana.kv_events.transports.nats_publisher import NatsPublisher

            return NatsPublisher(config, log)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--kv-events {config.publisher} needs a library that is not there: no module {error.name}; "
            "pip install 'ksana[events]'"
        ) from error
    return None
