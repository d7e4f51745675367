"""The last batches of events, and the content that all of them together have made."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ksana.kv_events.content import MAX_EVENT_SIZE, CacheContent
from ksana.kv_events.wire import decode_id, encode_batch
from ksana.types.kv_events import BlockRemoved, BlockStored, EventBatch, KVCacheEvent

MAX_BATCH_BYTES = 256 * 1024
"""Bytes of a batch beyond which the next event begins another one: a NATS server takes messages of 1 MiB by default."""

_HASH_BYTES = 9
_TOKEN_BYTES = 5
_OTHER_BYTES = 128
"""Of an event, or a batch, beside its lists: more than there ever are."""

_MAX_RING_BYTES = 64 * 2**20
_BATCHES_A_TURN = 64


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

    def answer(self, request: bytes, max_bytes: int = MAX_BATCH_BYTES) -> Iterator[EncodedBatch]:
        """What a consumer needs that lacks everything from an id on.

        These are the batches from that one on, or a dump if some of them are no longer kept, or too large. One who asks
        for ids that have not been given yet knows another engine, that was here before, and gets a dump too. It ends
        early for who reads so slowly that batches have gone meanwhile: the next answer is a dump then.

        Args:
            max_bytes: the largest payload that can be sent.

        Raises:
            ValueError: the request is no id.
        """
        event_id = decode_id(request)
        with self._lock:
            is_kept = self._next_id - len(self._ring) <= event_id <= self._next_id
            if is_kept and all(len(batch.payload) <= max_bytes for batch in self._kept_after(event_id - 1)):
                return self._replay(event_id, self._next_id)
        return self.dump(max_bytes)

    def dump(self, max_bytes: int = MAX_BATCH_BYTES) -> Iterator[EncodedBatch]:
        """The whole content, in batches that all have the id of the last one that is part of it.

        Args:
            max_bytes: of a payload; one block at least is in each all the same.
        """
        with self._lock:
            content, event_id, ts = self._content.copy(), self.last_id, self._ts
        max_bytes = min(max_bytes, MAX_BATCH_BYTES)
        # Half a batch an event at most, however small blocks are.
        events = content.as_events(min(MAX_EVENT_SIZE, max_bytes // (2 * (_HASH_BYTES + _TOKEN_BYTES))))
        for part in _parts(events, max_bytes):
            yield EncodedBatch(event_id, encode_batch(EventBatch(event_id, ts, part)))

    def _replay(self, first_id: int, end_id: int) -> Iterator[EncodedBatch]:
        """Batches that are kept, taken some at a time: who reads slowly must not keep them from being forgotten."""
        while first_id < end_id:
            batches = self.after(first_id - 1, min(_BATCHES_A_TURN, end_id - first_id))
            if batches[0].event_id != first_id:
                return
            yield from batches
            first_id += len(batches)

    def _kept_after(self, event_id: int, limit: int | None = None) -> list[EncodedBatch]:
        num_kept = len(self._ring)
        start = max(0, num_kept - (self.last_id - event_id))
        end = num_kept if limit is None else min(num_kept, start + limit)
        return [self._ring[index] for index in range(start, end)]

    def _forget_oldest(self) -> None:
        while len(self._ring) > self._buffer_steps or (self._ring_bytes > _MAX_RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft().payload)


def _parts(events: Iterable[KVCacheEvent], max_bytes: int = MAX_BATCH_BYTES) -> Iterator[tuple[KVCacheEvent, ...]]:
    """Events in groups that are no longer than a batch may be, but for one event that is."""
    part: list[KVCacheEvent] = []
    size = _OTHER_BYTES
    for event in events:
        more = _num_bytes(event)
        if part and size + more > max_bytes:
            yield tuple(part)
            part, size = [], _OTHER_BYTES
        part.append(event)
        size += more
    if part:
        yield tuple(part)


def _num_bytes(event: KVCacheEvent) -> int:
    """Most bytes that an event takes as it travels."""
    if isinstance(event, BlockRemoved):
        return _OTHER_BYTES + _HASH_BYTES * len(event.block_hashes)
    if isinstance(event, BlockStored):
        keys = sum(_OTHER_BYTES + 4 * len(key) for key in event.extra_keys)
        hashes = (_HASH_BYTES + 1) * len(event.block_hashes)  # and none of the extra keys for each
        return _OTHER_BYTES + hashes + _TOKEN_BYTES * len(event.token_ids) + keys
    return _OTHER_BYTES
