"""Requests in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from ksana.types.request import Request

SortKey = Callable[[Request], tuple[int, ...]]


def fcfs_key(request: Request) -> tuple[int, ...]:
    """First come, first served. A preempted request keeps its place before all that came later."""
    return (request.arrival_order,)


def priority_key(request: Request) -> tuple[int, ...]:
    """Lower ``priority`` first; first come, first served among equals."""
    return (request.priority, request.arrival_order)


SORT_KEYS: dict[str, SortKey] = {"fcfs": fcfs_key, "priority": priority_key}


class RequestQueue:
    """A list of requests kept sorted by ``key``. Add, remove and peek by binary search.

    The last one is the one to give way when blocks run out, so it is never one that the step has already served.
    """

    def __init__(self, key: SortKey) -> None:
        self._key = key
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Insert at its place: the end, for almost every one."""
        bisect.insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take out; raises ValueError if it is not in the queue."""
        index = bisect.bisect_left(self._requests, self._key(request), key=self._key)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request} is not in the queue")
        del self._requests[index]

    def discard(self, request: Request) -> bool:
        """Take out if it is in the queue; returns whether it was."""
        if request not in self._requests:
            return False
        self.remove(request)
        return True

    def pop_last(self) -> Request:
        """Take out the last one."""
        return self._requests.pop()

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
