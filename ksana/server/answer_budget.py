"""A bound on the memory of answers that are large: refused before they are computed, not when memory is full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ksana.errors import KsanaCode, RequestError

MAX_ANSWER_BYTES = 96 * 2**20
MAX_HELD_BYTES = 384 * 2**20
"""Of the numbers, as float32. While an answer is encoded it takes about three times as much."""


class AnswerBudget:
    """Counts the bytes of answers from their planning until they are sent. Thread-safe.

    Args:
        max_answer: most bytes of a single answer.
        max_held: most bytes of all answers at a time.
    """

    def __init__(self, max_answer: int = MAX_ANSWER_BYTES, max_held: int = MAX_HELD_BYTES) -> None:
        self._max_answer = max_answer
        self._max_held = max_held
        self._lock = threading.Lock()
        self.held = 0

    @contextmanager
    def answer(self) -> Iterator[Callable[[int], None]]:
        """An answer, for as long as it is held in memory: call what this yields with the bytes of each of its parts.

        The call raises RequestError if the answer becomes too large (400), or there are too many at a time (429).
        """
        size = 0
        ended = False

        def take(num_bytes: int) -> None:
            nonlocal size
            with self._lock:
                if ended:
                    raise RequestError("the client has left", status=499, code="client_left")
                if size + num_bytes > self._max_answer:
                    raise _too_large(size + num_bytes, self._max_answer)
                if self.held + num_bytes > self._max_held:
                    raise _too_many()
                size += num_bytes
                self.held += num_bytes

        try:
            yield take
        finally:
            with self._lock:
                ended = True  # planning may go on in a thread, and nobody would give back what it takes now
                self.held -= size


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the answer would take {size} bytes of memory, more than the {limit} that this server allows; ask for fewer "
        "positions, or in several calls",
        code="answer_too_large",
        param="requests",
        ksana_code=KsanaCode.LENGTH_EXCEEDED,
    )


def _too_many() -> RequestError:
    return RequestError(
        "too many large answers are being made; try again later",
        status=429,
        type="rate_limit_error",
        code="too_many_requests",
        ksana_code=KsanaCode.QUEUE_FULL,
    )
