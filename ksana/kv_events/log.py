"""The last batches of events, and the content that all of them together have made."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ksana.kv_events.content import CacheContent
from ksana.kv_events.wire import decode_id, encode_batch
from ksana.types.kv_events import BlockRemoved, BlockStored, EventBatch, KVCacheEvent

MAX_BATCH_SIZE = 32 * 1024
"""Tokens and hashes of a batch, of 9 bytes each at most, beyond which the next event begins another one: a NATS server
takes messages of 1 MiB."""

_MAX_RING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it travels: ``payload`` is what :func:`ksana.kv_events.wire.decode_batch` reads."""

    event_id: int
    payload: bytes


class EventLog:
    """Gives batches their ids, and keeps what consumers may have missed. Any thread may call it, and none waits long.

    Args:
        buffer_steps: batches that are kept; fewer if they are very large.
        first_id: id of the first batch; default: microseconds since 1970, so that ids go on rising when an engine is
            started again.
    """

    def __init__(self, buffer_steps: int, first_id: int | None = None) -> None:
        self._buffer_steps = buffer_steps
        self._next_id = time.time_ns() // 1000 if first_id is None else first_id
        self._ring: deque[EncodedBatch] = deque()
        self._ring_bytes = 0
        self._content = CacheContent()
        self._ts = 0.0
        self._lock = threading.Lock()

    @property
    def last_id(self) -> int:
        """Id of the last batch; one less than that of the first one as long as there is none."""
        return self._next_id - 1

    def append(self, events: Sequence[KVCacheEvent]) -> None:
        """Add a batch of these events, or several if they are many. Called by one thread only."""
        for part in _parts(events):
            ts = time.time()
            encoded = EncodedBatch(self._next_id, encode_batch(EventBatch(self._next_id, ts, part)))
            with self._lock:
                self._content.apply(part)
                self._ts = ts
                self._ring.append(encoded)
                self._ring_bytes += len(encoded.payload)
                self._next_id += 1
                self._forget_oldest()

    def after(self, event_id: int, limit: int | None = None) -> list[EncodedBatch]:
        """The batches after that one that are still kept, at most ``limit`` of them, oldest first."""
        with self._lock:
            return self._kept_after(event_id, limit)

    def answer(self, request: bytes) -> Iterator[EncodedBatch]:
        """What a consumer needs that lacks everything from an id on.

        These are the batches from that one on, or a dump if some of them are no longer kept. One who asks for ids that
        have not been given yet knows another engine, that was here before, and gets a dump too.

        Raises:
            ValueError: the request is no id.
        """
        event_id = decode_id(request)
        with self._lock:
            if self._next_id - len(self._ring) <= event_id <= self._next_id:
                return iter(self._kept_after(event_id - 1))
        return self.dump()

    def dump(self) -> Iterator[EncodedBatch]:
        """The whole content, in batches that all have the id of the last one that is part of it."""
        with self._lock:
            content, event_id, ts = self._content.copy(), self.last_id, self._ts
        for part in _parts(content.as_events()):
            yield EncodedBatch(event_id, encode_batch(EventBatch(event_id, ts, part)))

    def _kept_after(self, event_id: int, limit: int | None = None) -> list[EncodedBatch]:
        num_kept = len(self._ring)
        start = max(0, num_kept - (self.last_id - event_id))
        end = num_kept if limit is None else min(num_kept, start + limit)
        return [self._ring[index] for index in range(start, end)]

    def _forget_oldest(self) -> None:
        while len(self._ring) > self._buffer_steps or (self._ring_bytes > _MAX_RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft().payload)


def _parts(events: Iterable[KVCacheEvent]) -> Iterator[tuple[KVCacheEvent, ...]]:
    """Events in groups that are no longer than a batch may be, but for one event that is."""
    part: list[KVCacheEvent] = []
    size = 0
    for event in events:
        more = _size_of(event)
        if part and size + more > MAX_BATCH_SIZE:
            yield tuple(part)
            part, size = [], 0
        part.append(event)
        size += more
    if part:
        yield tuple(part)


def _size_of(event: KVCacheEvent) -> int:
    if isinstance(event, BlockStored):
        return len(event.token_ids) + len(event.block_hashes)
    return len(event.block_hashes) if isinstance(event, BlockRemoved) else 1
