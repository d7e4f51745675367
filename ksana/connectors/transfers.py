"""What the two sides of a store's connector share: work that is handed over, and saves that are under way."""

from __future__ import annotations

import threading
from collections import deque

from ksana.connectors.store_metadata import StoreMetadata


class Transfers:
    """Thread-safe. In one process, so that the scheduler side knows at once what the worker side has done.

    A step may never be executed, because the one before it has failed. What it was to transfer is done with the next
    one: blocks stay where they are until the worker side has reported them.
    """

    def __init__(self) -> None:
        self._outbox: deque[StoreMetadata] = deque()
        self._num_saves: dict[str, int] = {}
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        self._lock = threading.Lock()

    @property
    def is_pending(self) -> bool:
        """True if work has not reached the worker side, or saves are under way or not reported."""
        return bool(self._outbox or self._num_saves or self._ended)

    def hand_over(self, meta: StoreMetadata) -> None:
        """The scheduler side has described the work of a step."""
        with self._lock:
            self._outbox.append(meta)

    def peek(self, last: StoreMetadata) -> list[StoreMetadata]:
        """All work up to that of a step, which stays handed over."""
        with self._lock:
            return self._until(last)

    def take(self, last: StoreMetadata) -> list[StoreMetadata]:
        """All work up to that of a step, the step's own last."""
        with self._lock:
            taken = self._until(last)
            for _ in taken:
                self._outbox.popleft()
        return taken

    def begin_save(self, request_id: str) -> None:
        """A save of blocks of a request is asked for."""
        with self._lock:
            self._num_saves[request_id] = self._num_saves.get(request_id, 0) + 1

    def end_save(self, request_id: str) -> None:
        """It has ended, well or not, or is not done: nobody reads the blocks for it."""
        with self._lock:
            left = self._num_saves[request_id] - 1
            if left:
                self._num_saves[request_id] = left
                return
            del self._num_saves[request_id]
            if request_id in self._awaited:
                self._awaited.remove(request_id)
                self._ended.add(request_id)

    def is_saving(self, request_id: str) -> bool:
        """True while blocks of the request are read, or will be."""
        return request_id in self._num_saves

    def await_saves(self, request_id: str) -> bool:
        """Have the end of a request's saves reported once, by :meth:`take_ended`; False if there are none."""
        with self._lock:
            if request_id in self._num_saves:
                self._awaited.add(request_id)
            return request_id in self._num_saves or request_id in self._ended

    def take_ended(self) -> set[str]:
        """Requests of which nothing is read any more, of those for which that was asked."""
        if not self._ended:
            return set()
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def _until(self, last: StoreMetadata) -> list[StoreMetadata]:
        found = []
        for meta in self._outbox:
            found.append(meta)
            if meta is last:
                return found
        raise ValueError("this step's transfers have been taken already")
