"""Threads that copy blocks."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LAST = 1 << 30


class TransferThreads:
    """A few daemon threads that work off tasks by priority, and by age among equals.

    Daemons, since a store may be stuck in a call that nobody can end, and the process must end all the same.

    Args:
        count: of threads; they start with the first task.
        name: that their names begin with.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[], object] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(1, count + 1)
        ]
        self._is_started = False
        self.count = count

    @property
    def num_waiting(self) -> int:
        """Tasks that no thread has taken yet."""
        return self._tasks.qsize()

    def submit(self, task: Callable[[], object], *, priority: int) -> None:
        """Have a task run; a lower priority comes first. What it raises is logged."""
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        self._tasks.put((priority, next(self._numbers), task))

    def stop(self, timeout_s: float) -> None:
        """End the threads after the tasks that are waiting, or after some time without them."""
        if not self._is_started:
            return
        for _ in self._threads:
            self._tasks.put((_LAST, next(self._numbers), None))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while (task := self._tasks.get()[2]) is not None:
            try:
                task()
            except Exception:
                logger.exception("a transfer of KV cache blocks failed")
