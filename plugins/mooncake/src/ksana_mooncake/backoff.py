"""How long to wait before the next try."""

from __future__ import annotations


class Backoff:
    """Seconds that double with every failure, up to a limit."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def take(self) -> float:
        """Seconds to wait now."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s

    def skip(self) -> None:
        """The next wait is the longest: a try is expensive."""
        self._next_s = self._longest_s

    def reset(self) -> None:
        """It has worked."""
        self._next_s = self._first_s
