"""A block as a file: a header that says what must be there, and the layers one after the other.

All numbers are little-endian::

    8 bytes   magic
    uint16    version
    uint16    layers
    uint32    CRC-32 of the layers' bytes
    uint64    bytes of all layers
    uint16    bytes of the key
    ...       the key
    ...       the layers
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana.connectors.block_store import BlockBuffers

_HEADER = struct.Struct("<8sHHIQH")
_MAGIC = b"KSANA-KV"
_VERSION = 1
_MAX_PIECES = 512
"""Pieces of memory in one call of the system; every system takes so many."""


class DamagedBlockError(Exception):
    """A file does not hold the block that its name promises."""


def file_size(key: str, block: BlockBuffers) -> int:
    """Bytes of a block's file."""
    return _HEADER.size + len(key) + sum(layer.nbytes for layer in block)


def write_block(descriptor: int, key: str, block: BlockBuffers) -> None:
    """Write a block to an empty file. Raises OSError."""
    name = key.encode("ascii")
    size = sum(layer.nbytes for layer in block)
    header = _HEADER.pack(_MAGIC, _VERSION, len(block), _checksum(block), size, len(name)) + name
    _transfer(os.writev, descriptor, [memoryview(header), *(layer.data for layer in block)])


def read_block(descriptor: int, key: str, block: BlockBuffers) -> None:
    """Read a block straight into memory, which holds anything if that fails.

    Raises:
        DamagedBlockError: the file is cut off, of another block, or its bytes have changed.
        OSError: it cannot be read.
    """
    name = key.encode("ascii")
    header = memoryview(bytearray(_HEADER.size + len(name)))
    if os.fstat(descriptor).st_size != file_size(key, block):
        raise DamagedBlockError("its size is wrong")
    if not _transfer(os.readv, descriptor, [header, *(layer.data for layer in block)]):
        raise DamagedBlockError("it is cut off")
    magic, version, num_layers, checksum, size, name_size = _HEADER.unpack_from(header)
    if (magic, version, name_size, bytes(header[_HEADER.size :])) != (_MAGIC, _VERSION, len(name), name):
        raise DamagedBlockError("its header is wrong")
    if (num_layers, size) != (len(block), sum(layer.nbytes for layer in block)):
        raise DamagedBlockError("it is of another shape")
    if checksum != _checksum(block):
        raise DamagedBlockError("its checksum is wrong")


def _checksum(block: BlockBuffers) -> int:
    checksum = 0
    for layer in block:
        checksum = zlib.crc32(layer.data, checksum)
    return checksum


def _transfer(call: Callable[[int, Sequence[memoryview]], int], descriptor: int, pieces: list[memoryview]) -> bool:
    """Read or write pieces of memory one after the other. Returns False if the file ends before them."""
    first = 0
    while first < len(pieces):
        moved = call(descriptor, pieces[first : first + _MAX_PIECES])
        if moved == 0:
            return False
        while first < len(pieces) and moved >= pieces[first].nbytes:
            moved -= pieces[first].nbytes
            first += 1
        if moved:
            pieces[first] = pieces[first][moved:]
    return True
