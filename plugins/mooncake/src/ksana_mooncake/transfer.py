"""Values as they lie in the store: a block's layers one after the other, and a digest of them.

A value is put together of the pieces where they are, and taken apart into them, unless that is slow: over TCP each
piece costs as much as 200 KB, and a block has one for each layer. There a block is read into a buffer, in one piece.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from ksana.connectors.block_store import BlockBuffers

DIGEST_BYTES = 16


def digest(key: str, layers: BlockBuffers) -> bytes:
    """What a block's value ends with: of its content, and of whose content it is."""
    hasher = xxhash.xxh3_128(key.encode())
    for layer in layers:
        hasher.update(layer.data)
    return hasher.digest()


def address_of(array: np.ndarray) -> int:
    """Where an array's first byte lies."""
    address: int = array.__array_interface__["data"][0]
    return address


def num_bytes(layers: BlockBuffers) -> int:
    """Bytes of a block without its digest."""
    return sum(layer.nbytes for layer in layers)


class Slots:
    """Equal pieces of one region of memory, lent to one thread each.

    Attributes:
        region: uint8 [number, size], all of them.
    """

    def __init__(self, number: int, size: int) -> None:
        self.region = np.zeros((number, size), dtype=np.uint8)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(number):
            self._free.put(index)

    @contextmanager
    def take(self) -> Iterator[np.ndarray]:
        """A slot, as soon as there is one: uint8 [size]."""
        index = self._free.get()
        try:
            yield self.region[index]
        finally:
            self._free.put(index)


class Pieces:
    """Blocks whose layers are read and written where they are; their digests lie in a slot.

    Args:
        keys, blocks: as many keys as blocks.
        slot: at least ``DIGEST_BYTES`` a block.
    """

    def __init__(self, keys: Sequence[str], blocks: Sequence[BlockBuffers], slot: np.ndarray) -> None:
        self.keys = keys
        self._blocks = blocks
        self._digests = slot[: len(keys) * DIGEST_BYTES].reshape(len(keys), DIGEST_BYTES)

    def addresses(self) -> list[list[int]]:
        """Of each block's layers and its digest."""
        return [
            [*map(address_of, block), address_of(end)] for block, end in zip(self._blocks, self._digests, strict=True)
        ]

    def sizes(self) -> list[list[int]]:
        """In bytes."""
        return [[*(layer.nbytes for layer in block), DIGEST_BYTES] for block in self._blocks]

    def seal(self) -> None:
        """Write the digests, before the blocks are stored."""
        for key, block, end in zip(self.keys, self._blocks, self._digests, strict=True):
            end[:] = np.frombuffer(digest(key, block), dtype=np.uint8)

    def open(self, index: int) -> bool:
        """Whether a block that was read is what was stored."""
        expected: bytes = self._digests[index].tobytes()
        return digest(self.keys[index], self._blocks[index]) == expected


class Staged:
    """Blocks that are read into a slot, in one piece each, and copied from there.

    Args:
        keys, blocks: as many keys as blocks.
        slot: at least the bytes of all blocks with their digests.
    """

    def __init__(self, keys: Sequence[str], blocks: Sequence[BlockBuffers], slot: np.ndarray) -> None:
        self.keys = keys
        self._blocks = blocks
        ends = np.cumsum([num_bytes(block) + DIGEST_BYTES for block in blocks]).tolist()
        self._values = [slot[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def addresses(self) -> list[list[int]]:
        """Of each block's value."""
        return [[address_of(value)] for value in self._values]

    def sizes(self) -> list[list[int]]:
        """In bytes."""
        return [[value.nbytes] for value in self._values]

    def open(self, index: int) -> bool:
        """Copy a block that was read to its place, if it is what was stored."""
        value = self._values[index]
        content, end = value[:-DIGEST_BYTES], value[-DIGEST_BYTES:]
        if digest(self.keys[index], [content]) != end.tobytes():
            return False
        start = 0
        for layer in self._blocks[index]:
            layer[:] = content[start : start + layer.nbytes]
            start += layer.nbytes
        return True
