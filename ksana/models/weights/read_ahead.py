"""Work that a thread does ahead of the one that needs it, in order and within a limit of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Runs tasks on a thread from now on, and yields their results in order.

    The memory of results that nobody has taken yet is limited; one task always runs, however large. An exception in a
    task is raised in its place, and ends the iteration. Can be iterated once.

    Args:
        tasks: (bytes of the result, function that makes it).
        max_bytes: most bytes of results that are made ahead.
    """

    def __init__(self, tasks: Iterable[tuple[int, Callable[[], T]]], *, max_bytes: int) -> None:
        self._tasks = deque(tasks)
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ksana-read")
        self._ahead: deque[tuple[int, Future[T]]] = deque()
        self._ahead_bytes = 0
        self._fill()

    def __iter__(self) -> Iterator[T]:
        try:
            while self._ahead:
                num_bytes, future = self._ahead.popleft()
                result = future.result()
                del future  # it would keep the result while the consumer has it
                self._ahead_bytes -= num_bytes
                self._fill()
                yield result
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._tasks and (not self._ahead or self._ahead_bytes + self._tasks[0][0] <= self._max_bytes):
            num_bytes, function = self._tasks.popleft()
            self._ahead.append((num_bytes, self._pool.submit(function)))
            self._ahead_bytes += num_bytes
