"""Blocks in the host's memory: a second cache behind the device's, and the place of requests that are swapped out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ksana.connectors.block_store import BlockStore
from ksana.connectors.cache_views import CacheBlocks

if TYPE_CHECKING:
    from ksana.connectors.block_store import BlockBuffers


@dataclass(slots=True, eq=False)
class _Entry:
    """A block, and where its layers lie.

    Attributes:
        pins: reasons why it must stay; a copy under way is one, a reservation another.
        is_complete: its content has been copied.
        is_reserved: it belongs to a request, and is no cached content.
        is_discarded: nobody may find it any more; it goes with the last pin.
    """

    key: str
    slots: list[int]
    pins: int = 1
    is_complete: bool = False
    is_reserved: bool = False
    is_discarded: bool = False

    @property
    def is_readable(self) -> bool:
        return self.is_complete and not self.is_discarded


class MemoryStore(BlockStore):
    """Blocks in one piece of memory, the longest unused evicted first.

    The memory is cut into slots that hold one layer of a block each, so groups of any number of layers share it and
    nothing is fragmented. A call costs what it is asked for, not more with what is stored. The system gives the memory
    page by page when it is first written.

    Args:
        capacity: most bytes of blocks.
        slot_bytes: bytes of the largest layer of a block.
    """

    def __init__(self, capacity: int, slot_bytes: int) -> None:
        self._slab = np.empty((capacity // slot_bytes, slot_bytes), dtype=np.uint8)
        self._free = list(range(len(self._slab)))
        self._entries: dict[str, _Entry] = {}
        self._evictable: OrderedDict[str, _Entry] = OrderedDict()  # complete and unpinned, the longest unused first
        self._num_evictable_slots = 0
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks that are stored, or for which a place is kept."""
        return len(self._entries)

    @property
    def num_pins(self) -> int:
        """Pins that have not been returned. O(blocks): for tests."""
        with self._lock:
            return sum(entry.pins for entry in self._entries.values())

    def contains(self, keys: Sequence[str]) -> int:
        entries = self._entries
        with self._lock:
            for count, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None or not entry.is_readable:
                    return count
        return len(keys)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [self._touch(key) for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        found: list[tuple[int, _Entry]] = []
        with self._lock:
            for place, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is not None and entry.is_readable:
                    self._pin(entry)
                    found.append((place, entry))
        try:
            self._copy(found, buffers, is_load=True)
        finally:
            with self._lock:
                for _, entry in found:
                    self._unpin(entry)
        has_come = [False] * len(keys)
        for place, _ in found:
            has_come[place] = True
        return has_come

    def put(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        stored, begun = [], []
        with self._lock:
            for place, (key, num_layers) in enumerate(zip(keys, map(len, buffers), strict=True)):
                is_stored = self._touch(key)
                if not is_stored and key not in self._entries and self._make_room(num_layers):
                    begun.append((place, self._add(key, num_layers)))
                    is_stored = True
                stored.append(is_stored)
        self._fill(begun, buffers)
        return stored

    def slots_of(self, pinned: Sequence[str]) -> list[list[int]]:
        """Where the layers of blocks lie that :meth:`pin` has returned; as long as they are pinned, they stay there."""
        with self._lock:
            return [self._entries[key].slots for key in pinned]

    def read_layer(self, slots: np.ndarray, layer: np.ndarray, block_ids: np.ndarray) -> None:
        """Copy a layer of several blocks: from slots to rows of ``layer``, uint8 [blocks, bytes of a block]."""
        layer[block_ids] = self._slab[:, : layer.shape[1]][slots]

    def pin(self, keys: Sequence[str]) -> list[str]:
        pinned = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.is_readable:
                    self._pin(entry)
                    pinned.append(key)
        return pinned

    def unpin(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._unpin(self._entries[key])

    def reserve(self, keys: Sequence[str], num_layers: Sequence[int]) -> bool:
        """Keep a place for blocks that are no cached content, until :meth:`discard`.

        Args:
            keys: unlike any other.
            num_layers: of each block.

        Returns:
            False, with nothing changed, if there is no room.
        """
        with self._lock:
            if sum(num_layers) > len(self._free) + self._num_evictable_slots:
                return False
            for key, count in zip(keys, num_layers, strict=True):
                self._make_room(count)
                self._add(key, count).is_reserved = True
        return True

    def fill(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> None:
        """Copy blocks to their reserved places; those that have been given back meanwhile are left out."""
        begun = []
        with self._lock:
            for place, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is not None and not entry.is_discarded:
                    self._pin(entry)
                    begun.append((place, entry))
        self._fill(begun, buffers)

    def discard(self, keys: Sequence[str]) -> None:
        """Give reserved places back; where somebody still copies, as soon as that has ended."""
        with self._lock:
            for key in keys:
                entry = self._entries[key]
                entry.is_discarded = True
                self._unpin(entry)

    def clear(self) -> None:
        """Forget all cached content; what is reserved stays."""
        with self._lock:
            while self._evictable:
                self._evict()
            for entry in self._entries.values():
                entry.is_discarded = entry.is_discarded or not entry.is_reserved

    def _touch(self, key: str) -> bool:
        entry = self._entries.get(key)
        if entry is None or not entry.is_readable:
            return False
        if entry.pins == 0:
            self._evictable.move_to_end(key)
        return True

    def _make_room(self, num_slots: int) -> bool:
        if num_slots > len(self._free) + self._num_evictable_slots:
            return False
        while num_slots > len(self._free):
            self._evict()
        return True

    def _add(self, key: str, num_slots: int) -> _Entry:
        slots = self._free[-num_slots:]
        del self._free[-num_slots:]
        entry = self._entries[key] = _Entry(key, slots)
        return entry

    def _fill(self, begun: list[tuple[int, _Entry]], buffers: Sequence[BlockBuffers]) -> None:
        """Copy content to places that are pinned for it, and return these pins. What cannot be copied is forgotten."""
        is_copied = False
        try:
            self._copy(begun, buffers, is_load=False)
            is_copied = True
        finally:
            with self._lock:
                for _, entry in begun:
                    entry.is_complete = is_copied
                    entry.is_discarded |= not (is_copied or entry.is_reserved)
                    self._unpin(entry)

    def _copy(self, entries: list[tuple[int, _Entry]], buffers: Sequence[BlockBuffers], *, is_load: bool) -> None:
        """Copy pinned blocks from the slab, or to it; each stands beside its place among the buffers."""
        if isinstance(buffers, CacheBlocks):
            self._copy_by_layer(entries, buffers, is_load=is_load)
            return
        for place, entry in entries:
            for slot, layer in zip(entry.slots, buffers[place], strict=True):
                stored = self._slab[slot, : layer.nbytes]
                np.copyto(*((layer, stored) if is_load else (stored, layer)))

    def _copy_by_layer(self, entries: list[tuple[int, _Entry]], blocks: CacheBlocks, *, is_load: bool) -> None:
        """The same with a call for each layer instead of one for each layer of each block."""
        if not entries:
            return
        slots_of = dict(entries)
        for group_id, places, block_ids in blocks.by_group():
            wanted = [place in slots_of for place in places]
            slots = np.array([slots_of[place].slots for place in places if place in slots_of])
            ids = block_ids[wanted]
            for number, layer in enumerate(blocks.layers(group_id) if len(ids) else ()):
                if is_load:
                    self.read_layer(slots[:, number], layer, ids)
                else:
                    self._slab[:, : layer.shape[1]][slots[:, number]] = layer[ids]

    def _pin(self, entry: _Entry) -> None:
        if entry.pins == 0:
            del self._evictable[entry.key]
            self._num_evictable_slots -= len(entry.slots)
        entry.pins += 1

    def _unpin(self, entry: _Entry) -> None:
        entry.pins -= 1
        if entry.pins == 0:
            self._evictable[entry.key] = entry
            self._num_evictable_slots += len(entry.slots)
            if entry.is_discarded:
                self._forget(entry)

    def _evict(self) -> None:
        self._forget(next(iter(self._evictable.values())))

    def _forget(self, entry: _Entry) -> None:
        del self._evictable[entry.key]
        del self._entries[entry.key]
        self._num_evictable_slots -= len(entry.slots)
        self._free.extend(entry.slots)
