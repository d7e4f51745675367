"""Which blocks are in a cache, put together from its events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

MAX_EVENT_SIZE = 8192
"""Most tokens or hashes of one event: a batch of some events must fit into one message of any transport."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One block of a group.

    Attributes:
        parent_block_hash, lora_name, extra_keys: as in :class:`BlockStored`.
        token_ids: unsigned 32-bit integers, ``block_size`` of them.
    """

    parent_block_hash: int | None
    token_ids: array[int]
    lora_name: str | None
    extra_keys: tuple[str | bytes, ...]


@dataclass(slots=True)
class CachedGroup:
    """Blocks of one KV cache group, by their hash.

    Attributes:
        block_size, sliding_window: as in :class:`BlockStored`.
    """

    block_size: int
    sliding_window: int | None
    blocks: dict[int, CachedBlock]


class CacheContent:
    """The blocks of a cache.

    Attributes:
        groups: by group id; one that never had a block is missing.
    """

    def __init__(self) -> None:
        self.groups: dict[int, CachedGroup] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(len(group.blocks) for group in self.groups.values())

    def block_hashes(self, group_id: int = 0) -> set[int]:
        """Hashes of the blocks of a group."""
        group = self.groups.get(group_id)
        return set(group.blocks) if group else set()

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Do what the events say. A block stored twice is there once; one removed that is not there is no error."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.groups.clear()

    def copy(self) -> CacheContent:
        """An independent copy; the blocks themselves never change, and are shared."""
        twin = CacheContent()
        twin.groups = {
            group_id: CachedGroup(group.block_size, group.sliding_window, group.blocks.copy())
            for group_id, group in self.groups.items()
        }
        return twin

    def as_events(self, max_event_size: int = MAX_EVENT_SIZE) -> Iterator[KVCacheEvent]:
        """Events that make this content out of any other: all cleared, then parents stored before their children.

        Args:
            max_event_size: tokens of one event, or one block.
        """
        yield AllBlocksCleared()
        for group_id, group in self.groups.items():
            for run in _runs(group.blocks):
                most = max(1, max_event_size // group.block_size)
                for start in range(0, len(run), most):
                    yield _stored(group_id, group, run[start : start + most])

    def _store(self, event: BlockStored) -> None:
        group = self.groups.get(event.group_id)
        if group is None:
            group = self.groups[event.group_id] = CachedGroup(event.block_size, event.sliding_window, {})
        parent, extra_keys, size = event.parent_block_hash, event.extra_keys, event.block_size
        tokens = array("I", event.token_ids)
        for index, block_hash in enumerate(event.block_hashes):
            block = CachedBlock(parent, tokens[index * size : (index + 1) * size], event.lora_name, extra_keys)
            group.blocks[block_hash] = block
            parent, extra_keys = block_hash, ()

    def _remove(self, event: BlockRemoved) -> None:
        group = self.groups.get(event.group_id)
        if group is not None:
            for block_hash in event.block_hashes:
                group.blocks.pop(block_hash, None)


def _runs(blocks: dict[int, CachedBlock]) -> Iterator[list[int]]:
    """The forest of blocks, cut into chains from parent to child, in an order in which no child precedes its parent."""
    children: dict[int, list[int]] = {}
    heads: list[int] = []  # where chains begin whose parents have been told
    for block_hash, block in blocks.items():
        parent = block.parent_block_hash
        if parent is None or parent not in blocks:
            heads.append(block_hash)
        else:
            children.setdefault(parent, []).append(block_hash)
    while heads:
        run = [heads.pop()]
        while following := children.get(run[-1]):
            heads += following[1:]
            run.append(following[0])
        yield run


def _stored(group_id: int, group: CachedGroup, hashes: list[int]) -> BlockStored:
    first = group.blocks[hashes[0]]
    return BlockStored(
        tuple(hashes),
        first.parent_block_hash,
        tuple(token for block_hash in hashes for token in group.blocks[block_hash].token_ids),
        group.block_size,
        group_id,
        group.sliding_window,
        first.lora_name,
        first.extra_keys,
    )
