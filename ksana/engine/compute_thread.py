"""A thread that only computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_JOIN_TIMEOUT_S = 60.0


class ComputeThread:
    """Runs functions one after the other, in the order in which they are submitted.

    The model is loaded and run on it, and nothing else: OpenMP keeps a team of workers for every thread that computes.
    Unlike the threads of an executor of the standard library, it is no reason to wait when the process ends.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ksana-compute", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` after all that was submitted before; the result is there when it is done."""
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future

    def stop(self) -> None:
        """End the thread after all that was submitted."""
        self._queue.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            future, function = work
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits for the result gets to hear of it
                future.set_exception(error)
            del work, future, function  # or the last result would live on while the thread waits
