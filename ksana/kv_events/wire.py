"""Batches as bytes: the MessagePack arrays of vLLM's KV events, which routers of other makes read.

A batch is ``[ts, events, data_parallel_rank]``; its id travels beside it. An event is an array that begins with its
name; ``docs/kv_events.md`` has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent

ID_BYTES = 8
"""Bytes of an event id, unsigned and big-endian."""

END_ID = 2**64 - 1
"""In place of an id, with nothing behind it: the answer to a request is complete."""

_DATA_PARALLEL_RANK = 0
_UNICODE_ERRORS = "surrogatepass"
"""A salt may be any string of Python's."""

_FULL_ATTENTION = "full_attention"
_SLIDING_WINDOW = "sliding_window"


def encode_id(event_id: int) -> bytes:
    """An id as it travels."""
    return event_id.to_bytes(ID_BYTES, "big")


def decode_id(data: bytes) -> int:
    """Raises ValueError if it is none."""
    if len(data) != ID_BYTES:
        raise ValueError(f"an event id has {ID_BYTES} bytes, not {len(data)}")
    return int.from_bytes(data, "big")


def encode_batch(batch: EventBatch) -> bytes:
    """All of a batch but its id."""
    events = [_pack(event) for event in batch.events]
    packed: bytes = msgpack.packb([batch.ts, events, _DATA_PARALLEL_RANK], unicode_errors=_UNICODE_ERRORS)
    return packed


def decode_batch(event_id: int, payload: bytes) -> EventBatch:
    """The opposite of :func:`encode_batch`. Raises ValueError if ``payload`` is no batch."""
    try:
        ts, events, *_ = msgpack.unpackb(payload, unicode_errors=_UNICODE_ERRORS)
        return EventBatch(event_id, float(ts), tuple(_unpack(*event) for event in events))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _pack(event: KVCacheEvent) -> list[Any]:
    name = type(event).__name__
    if isinstance(event, BlockStored):
        # None thrice: an id of an adapter, which has a name here; a storage medium, which is always the device;
        # and keys of blocks, of which only the first one of a sequence may have some.
        extra_keys = [list(event.extra_keys), *[None] * (len(event.block_hashes) - 1)] if event.extra_keys else None
        kind = _FULL_ATTENTION if event.sliding_window is None else _SLIDING_WINDOW
        return [
            name,
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            None,
            None,
            event.lora_name,
            extra_keys,
            event.group_id,
            kind,
            event.sliding_window,
        ]
    if isinstance(event, BlockRemoved):
        return [name, event.block_hashes, None, event.group_id]
    return [name]


def _unpack(name: str, *fields: Any) -> KVCacheEvent:
    if name == BlockStored.__name__:
        return _unpack_stored(*fields)
    if name == BlockRemoved.__name__:
        return _unpack_removed(*fields)
    if name == AllBlocksCleared.__name__:
        return AllBlocksCleared()
    raise ValueError(f"there is no event {name!r}")


def _unpack_stored(
    block_hashes: Sequence[int],
    parent_block_hash: int | None,
    token_ids: Sequence[int],
    block_size: int,
    _lora_id: object = None,
    _medium: object = None,
    lora_name: str | None = None,
    extra_keys: Sequence[Sequence[str | bytes] | None] | None = None,
    group_id: int | None = None,
    _kind: object = None,
    sliding_window: int | None = None,
    *_later: object,
) -> BlockStored:
    if len(token_ids) != len(block_hashes) * block_size:
        raise ValueError(f"{len(token_ids)} tokens for {len(block_hashes)} blocks of {block_size}")
    return BlockStored(
        tuple(block_hashes),
        parent_block_hash,
        tuple(token_ids),
        block_size,
        group_id or 0,
        sliding_window,
        lora_name,
        tuple((extra_keys[0] if extra_keys else None) or ()),
    )


def _unpack_removed(
    block_hashes: Sequence[int], _medium: object = None, group_id: int | None = None, *_later: object
) -> BlockRemoved:
    return BlockRemoved(tuple(block_hashes), group_id or 0)
