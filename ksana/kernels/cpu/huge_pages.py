"""Memory for weights and the KV cache, in large pages where the system has them: they need few address translations."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

PAGE_BYTES = 2 * 2**20
_CHUNK_BYTES = 16 * PAGE_BYTES
_ALIGNMENT = 64


class HugePageArena:
    """Hands out pieces of large mappings. A piece lives as long as a tensor on it; nothing is reused."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Let the next pieces, of so many bytes in all, lie side by side: between mappings, large pages are wasted."""
        if num_bytes > len(self._chunk):
            self._chunk = _map(num_bytes)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed uint8 [num_bytes], aligned to a cache line."""
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if needed > len(self._chunk):
            chunk = _map(max(needed, _CHUNK_BYTES))
            if len(chunk) - needed < len(self._chunk):  # keep the chunk with more room
                return torch.from_numpy(chunk[:num_bytes])
            self._chunk = chunk
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[needed:]
        return torch.from_numpy(piece)


def _map(num_bytes: int) -> np.ndarray:
    # Large pages lie at multiples of their size, mappings need not.
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no large pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    offset = -memory.ctypes.data % PAGE_BYTES
    return memory[offset : offset + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES]
