"""Turns what the KV cache manager does into events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ksana.kv_events.block_hash import external_hash
from ksana.kv_events.content import MAX_EVENT_SIZE
from ksana.kv_events.log import EventLog
from ksana.kv_events.publisher import KVEventPublisher
from ksana.types.kv import KVCacheConfig
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from ksana.types.request import Request

_LONGEST_SALT = 256
"""Characters."""


@dataclass(slots=True)
class _Stored:
    """A :class:`BlockStored` to which blocks may still be added."""

    group_id: int
    parent_block_hash: int | None
    block_hashes: list[int]
    token_ids: list[int]
    extra_keys: tuple[str | bytes, ...]


@dataclass(slots=True)
class _Removed:
    """A :class:`BlockRemoved` to which blocks may still be added."""

    group_id: int
    block_hashes: list[int]


class KVEventRecorder:
    """The observer of an engine's KV cache (:class:`ksana.kv.observer.KVCacheObserver`).

    Collects until :meth:`flush`. What happens to one group's blocks in a row is one event: a chain that grows, or
    blocks that leave. Events of different groups may change places, since no block belongs to two.

    Args:
        config: the cache that is observed.
        log: gets the events.
        publisher: is told.
    """

    def __init__(self, config: KVCacheConfig, log: EventLog, publisher: KVEventPublisher) -> None:
        self._block_size = config.block_size
        self._windows = [group.sliding_window for group in config.groups]
        self._most_blocks = max(1, MAX_EVENT_SIZE // self._block_size)
        self._log = log
        self._publisher = publisher
        self._pending: list[_Stored | _Removed | AllBlocksCleared] = []
        self._last_of_group: dict[int, _Stored | _Removed] = {}
        self.all_blocks_cleared()  # a consumer may remember what an engine that was here before had

    def blocks_stored(self, request: Request, group_id: int, first_index: int, block_hashes: Sequence[bytes]) -> None:
        parent = external_hash(request.block_hashes[first_index - 1]) if first_index else None
        extra_keys = () if first_index else _extra_keys(request, block_hashes[0])
        size, tokens = self._block_size, request.all_token_ids
        index = first_index
        for block_hash in map(external_hash, block_hashes):
            event = self._last_of_group.get(group_id)
            if (
                not isinstance(event, _Stored)
                or event.block_hashes[-1] != parent
                or len(event.block_hashes) == self._most_blocks
            ):
                event = _Stored(group_id, parent, [], [], extra_keys)
                self._begin(event)
            event.block_hashes.append(block_hash)
            event.token_ids += tokens[index * size : (index + 1) * size]
            parent, extra_keys = block_hash, ()
            index += 1

    def block_removed(self, group_id: int, block_hash: bytes) -> None:
        event = self._last_of_group.get(group_id)
        if not isinstance(event, _Removed) or len(event.block_hashes) == MAX_EVENT_SIZE:
            event = _Removed(group_id, [])
            self._begin(event)
        event.block_hashes.append(external_hash(block_hash))

    def all_blocks_cleared(self) -> None:
        self._pending = [AllBlocksCleared()]  # what was stored or removed before it does not matter any more
        self._last_of_group.clear()
        self.flush()  # it may happen between steps, and then the next step may be far away

    def flush(self) -> None:
        """Publish what has been collected, as one batch. Called after every step."""
        if not self._pending:
            return
        self._log.append([self._freeze(event) for event in self._pending])
        self._pending.clear()
        self._last_of_group.clear()
        self._publisher.notify()

    def close(self) -> None:
        """Publish what is left, and stop the publisher."""
        self.flush()
        self._publisher.close()

    def _begin(self, event: _Stored | _Removed) -> None:
        self._pending.append(event)
        self._last_of_group[event.group_id] = event

    def _freeze(self, event: _Stored | _Removed | AllBlocksCleared) -> KVCacheEvent:
        if isinstance(event, _Stored):
            return BlockStored(
                tuple(event.block_hashes),
                event.parent_block_hash,
                tuple(event.token_ids),
                self._block_size,
                event.group_id,
                self._windows[event.group_id],
                extra_keys=event.extra_keys,
            )
        if isinstance(event, _Removed):
            return BlockRemoved(tuple(event.block_hashes), event.group_id)
        return event


def _extra_keys(request: Request, first_hash: bytes) -> tuple[str | bytes, ...]:
    keys: list[str | bytes] = [_short(request.cache_salt)] if request.cache_salt else []
    if request.embeddings:
        # The hash covers them, so it stands for them, and they need not be digested once more.
        keys.append(first_hash)
    return tuple(keys)


def _short(salt: str) -> str:
    """A salt, or what stands for one: clients send salts of any length, and messages have a limit."""
    if len(salt) <= _LONGEST_SALT:
        return salt
    return f"sha256:{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}"
