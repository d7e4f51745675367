"""What happens to the content of the KV cache, for those who route requests to where their prefix is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks, each one the next of the one before it, can be found in the cache from now on.

    Attributes:
        block_hashes: of the blocks, as :func:`ksana.kv_events.block_hash.external_hash` makes them.
        parent_block_hash: of the block before the first one; None if a sequence begins with the first one.
        token_ids: of all the blocks, ``block_size`` for each.
        block_size: tokens per block.
        group_id: KV cache group: layers with equal needs.
        sliding_window: tokens that the group's layers look back, None for all of them. Blocks of such a group come
            and go without those before them.
        lora_name: adapter that the blocks were computed with, None for none.
        extra_keys: what else decides over the content of a sequence that begins with the first block: the salt of its
            cache, and 32 bytes that stand for embeddings given in place of tokens.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: int = 0
    sliding_window: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[str | bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of a group can no longer be found."""

    block_hashes: tuple[int, ...]
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block of any group can be found any more. The first event of every engine."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in the order in which they happened.

    Attributes:
        event_id: one more than that of the batch before. The first one of an engine is taken from the clock, so it is
            higher than all of an engine that was there before: a restart looks like a gap. In a dump, that of the last
            batch whose events are part of it.
        ts: seconds since 1970 of the last of the events.
    """

    event_id: int
    ts: float
    events: tuple[KVCacheEvent, ...]
