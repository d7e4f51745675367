"""How much of a mapped weight file is open at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

MAX_BATCH_BYTES = 64 * 2**20
"""Pages of a mapped file count as memory of the process once they are read, until the mapping goes. Readers therefore
map a file anew for every batch of about this many bytes: what the model has copied is given back at once."""


def batch_by_bytes(items: Iterable[tuple[int, T]], max_bytes: int = MAX_BATCH_BYTES) -> Iterator[list[T]]:
    """Split (number of bytes, item) pairs into lists of at most ``max_bytes``, or of one larger item."""
    batch: list[T] = []
    batch_bytes = 0
    for num_bytes, item in items:
        if batch and batch_bytes + num_bytes > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += num_bytes
    if batch:
        yield batch
