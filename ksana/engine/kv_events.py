"""The publisher of KV cache events, and what an engine does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.plugin.manager import KsanaPluginManager
from ksana.types.config import KVEventsConfig
from ksana.types.kv import KVCacheConfig

if TYPE_CHECKING:
    from ksana.kv_events.log import EventLog
    from ksana.kv_events.publisher import KVEventPublisher
    from ksana.kv_events.recorder import KVEventRecorder


@dataclass(frozen=True, slots=True)
class KVEventStream:
    """A publisher that works, and the log that it reads."""

    log: EventLog
    publisher: KVEventPublisher

    def recorder(self, kv: KVCacheConfig) -> KVEventRecorder:
        """What writes the log of a cache, which is empty now."""
        from ksana.kv_events.recorder import KVEventRecorder

        return KVEventRecorder(kv, self.log, self.publisher)


def open_event_stream(config: KVEventsConfig, plugins: KsanaPluginManager) -> KVEventStream | None:
    """Start the publisher that is configured, if one is.

    Raises:
        UsageError: nobody has it, or it cannot work.
    """
    if config.publisher == "none":
        return None
    from ksana.kv_events.log import EventLog

    log = EventLog(config.buffer_steps)
    publisher: KVEventPublisher | None = plugins.hook.ksana_create_kv_event_publisher(config=config, log=log)
    if publisher is None:
        raise UsageError(f"no plugin has the publisher of --kv-events {config.publisher!r}; built in are zmq and nats")
    return KVEventStream(log, publisher)
