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
    if config.publisher in ("zmq", "nats"):
        _check_utf8(config)
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
            "in a checkout of Ksana: pip install '.[events]'"
        ) from error
    return None


def _check_utf8(config: KVEventsConfig) -> None:
    """Command lines may have any bytes."""
    texts = {
        "--kv-events-endpoint": config.endpoint,
        "--kv-events-replay-endpoint": config.replay_endpoint,
        "--kv-events-topic": config.topic,
    }
    for flag, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{flag} is not valid UTF-8") from None
