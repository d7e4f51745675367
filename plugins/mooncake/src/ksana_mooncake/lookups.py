"""Answers to "is this block stored?" without waiting for them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger("ksana.mooncake")

_BATCH = 256
"""Keys that are asked for at once. Where one of them is missing the rest of the prompt need not be asked for."""

_STORED_FOR_S = 4.0
"""How long it is believed that a block is stored. Asking made sure that it stays for longer: masters say 5 to 10 s."""

_MISSING_FOR_S = 1.0
_UNHEARD_FOR_S = 30.0
"""How long an answer is kept for who has asked, and may be in a step that takes long: nobody should ask for ever."""

_MOST_ANSWERS = 1 << 16

Ask = Callable[[Sequence[str]], "list[bool] | None"]


@dataclass(slots=True)
class _Answer:
    """What the store has said.

    Attributes:
        expires: when it is no longer believed; moved to an earlier time when somebody has heard it.
    """

    is_stored: bool
    expires: float
    is_heard: bool = False

    def hear(self, now: float) -> None:
        """Somebody has heard it."""
        if not self.is_heard:
            self.is_heard = True
            self.expires = now + (_STORED_FOR_S if self.is_stored else _MISSING_FOR_S)


class Lookups:
    """Asks the store in a thread, and remembers for a while what it has said.

    Args:
        ask: whether each key is stored, or None if nobody knows; called by the thread, may take long.
        timeout_s: after that time without an answer a block counts as missing.
    """

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # the oldest first
        self._deadlines: dict[str, float] = {}  # of questions under way, by the first of their keys
        self._num_forgotten = 0  # times; an answer from before such a time says nothing
        self._lock = threading.Lock()
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mooncake-lookups", daemon=True)
        self._thread.start()

    def count(self, keys: Sequence[str]) -> int | None:
        """How many of the first ``keys`` are stored; None if that is being asked for."""
        now = time.monotonic()
        with self._lock:
            for index, key in enumerate(keys):
                answer = self._answers.get(key)
                if answer is None or answer.expires < now:
                    return index if self._is_overdue(keys, index, now) else None
                answer.hear(now)
                if not answer.is_stored:
                    return index
            return len(keys)

    def learn(self, keys: Sequence[str], stored: Sequence[bool]) -> None:
        """Take note of what has shown without asking."""
        now = time.monotonic()
        with self._lock:
            self._note(keys, stored)
            for key in keys:
                if (answer := self._answers.get(key)) is not None:  # more than are kept, the first are forgotten
                    answer.hear(now)

    def forget(self) -> None:
        """What was known is void, and so is what is being asked just now."""
        with self._lock:
            self._answers.clear()
            self._num_forgotten += 1

    def after(self, work: Callable[[], None]) -> None:
        """Do something in the thread, after the questions so far and before those to come."""
        self._questions.put(work)

    def close(self) -> None:
        """End the thread; what it is waiting for, it waits for in the background."""
        self._questions.put(None)
        self._thread.join(0.5)

    def _is_overdue(self, keys: Sequence[str], index: int, now: float) -> bool:
        """Whether the answer for ``keys[index]`` has been waited for too long; asks for it if that is not under way."""
        first = keys[index]
        deadline = self._deadlines.get(first)
        if deadline is None:
            deadline = self._deadlines[first] = now + self._timeout_s
            wanted = list(keys[index:])
            self._questions.put(lambda: self._answer(wanted, deadline))
        return now >= deadline

    def _answer(self, keys: list[str], deadline: float) -> None:
        known: list[bool] = []
        num_forgotten = self._num_forgotten
        try:
            while len(known) < len(keys) and all(known) and time.monotonic() < deadline:
                stored = self._ask(keys[len(known) : len(known) + _BATCH])
                if stored is None:
                    break
                known += stored
        finally:
            with self._lock:
                if num_forgotten == self._num_forgotten:
                    self._note(keys, known or [False])
                del self._deadlines[keys[0]]

    def _note(self, keys: Sequence[str], stored: Sequence[bool]) -> None:
        expires = time.monotonic() + _UNHEARD_FOR_S
        for key, is_stored in zip(keys, stored, strict=False):
            self._answers[key] = _Answer(is_stored, expires)
            self._answers.move_to_end(key)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question()
            except Exception:
                logger.exception("looking up blocks in the global cache has failed")
