"""The KV cache's memory, taken from the system a little before it is written.

A page is found and cleared when it is first touched: a large one in 0.2 ms, and in a virtual machine whose host has to
find it first, in 5 ms. Without this, steps that write to new blocks would wait for it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ksana.kernels.cpu.huge_pages import PAGE_BYTES

logger = logging.getLogger(__name__)

AHEAD_BYTES = 512 * 2**20
"""Of a cache: how much more than is in use gets its pages."""

_STOP_TIMEOUT_S = 10.0

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: pages as if something had been written to them, but what is in them stays."""


class PagesAhead:
    """Takes pages for the blocks that are going to be written next, on a thread that lives for as long as that takes.

    New blocks are used in ascending order; what is behind the highest one so far is new.

    Args:
        tensors: of a cache, [blocks, ...] each, in whole large pages of this process.
        ahead_bytes: in all tensors together.
        take: the pages of (address, bytes), which are multiples of a large page. After an OSError nothing more is
            taken ahead.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        ahead_bytes: int = AHEAD_BYTES,
        take: Callable[[int, int], None] | None = None,
    ) -> None:
        self._tensors = tensors  # whose memory must not go while the thread is at it
        # Numbers, for the thread has nothing to do with torch.
        self._places = [(tensor.data_ptr(), len(tensor), tensor[0].nbytes) for tensor in tensors]
        self._take = take or _take
        self._num_blocks = max(len(tensor) for tensor in tensors)
        block_bytes = sum(tensor.nbytes for tensor in tensors) // self._num_blocks
        self._ahead = max(1, ahead_bytes // block_bytes)
        self._goal = self._done = 0  # blocks that get their pages, and that have them
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        _alive.add(self)
        self.reach(0)

    def reach(self, block: int) -> None:
        """A block is in use: let the next ones have their pages soon."""
        if self._goal < min(self._num_blocks, block + self._ahead * 3 // 4):  # not for a few blocks every time
            with self._lock:
                self._goal = min(self._num_blocks, block + self._ahead)
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(target=self._run, name="ksana-pages", daemon=True)
                    self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until there is nothing more to take for now."""
        if (thread := self._thread) is not None:
            thread.join(timeout)

    def stop(self) -> None:
        """Take nothing more, and wait for the thread."""
        self._stopping = True
        self.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while self._has_more():
                goal = self._goal
                for address in self._pages(self._done, goal):
                    if self._stopping:
                        return
                    self._take(address, PAGE_BYTES)
                self._done = goal
        except OSError as error:
            logger.debug("the cache's pages come when they are first touched: %s", error)
            self._goal = self._num_blocks  # nothing starts another thread

    def _has_more(self) -> bool:
        """False for the thread to end, which the next one who wants pages is to know."""
        with self._lock:
            if self._done < self._goal:
                return True
            self._thread = None
            return False

    def _pages(self, first: int, end: int) -> Iterator[int]:
        """Addresses of the large pages with blocks [first, end) of all tensors, those of lower blocks before others."""
        step = max(1, PAGE_BYTES // max(block_bytes for _, _, block_bytes in self._places))
        for block in range(first, end, step):
            for address, num_blocks, block_bytes in self._places:
                last = min(block + step, end, num_blocks)
                if block < last:
                    start = (address + block * block_bytes) // PAGE_BYTES * PAGE_BYTES
                    yield from range(start, address + last * block_bytes, PAGE_BYTES)


_alive: weakref.WeakSet[PagesAhead] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that comes back from the system to an interpreter that is going away is killed on the spot.
    for pages in list(_alive):
        pages.stop()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _take(address: int, num_bytes: int) -> None:
    # Not by mmap.madvise, which keeps the interpreter's lock.
    if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
