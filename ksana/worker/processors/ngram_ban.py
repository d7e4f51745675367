"""The ban on repeating n-grams."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

_MODULUS = 2**61 - 1
_BASE = 0x10F3_91C8_6A45_D2B7


class _Window:
    """The last ``size`` tokens, known by a hash that is brought up to date with each token (Karp and Rabin 1987)."""

    __slots__ = ("_leaving", "_size", "_tokens", "hash")

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: deque[int] = deque()
        self._leaving = pow(_BASE, size, _MODULUS)
        self.hash = 0

    @property
    def is_full(self) -> bool:
        return len(self._tokens) == self._size

    def push(self, token_id: int) -> None:
        self._tokens.append(token_id)
        mixed = self.hash * _BASE + token_id + 1
        if len(self._tokens) > self._size:
            mixed -= (self._tokens.popleft() + 1) * self._leaving
        self.hash = mixed % _MODULUS


class NgramBan:
    """Bans the tokens that have followed the last n - 1 tokens before.

    Args:
        size: n, at least 1.
        tokens: of the request so far. Their n-grams, and those of the tokens to come, are not to be repeated.
        num_learned: n-grams that end behind so many tokens may be.
    """

    def __init__(self, size: int, tokens: Sequence[int], num_learned: float = math.inf) -> None:
        self._followers: dict[int, set[int]] = {}
        self._window = _Window(size - 1)
        self._num_to_learn = num_learned
        for token in tokens:
            self.push(token)

    def push(self, token_id: int) -> None:
        """A token has been generated."""
        window = self._window
        if self._num_to_learn > 0:
            self._num_to_learn -= 1
            if window.is_full:
                self._followers.setdefault(window.hash, set()).add(token_id)
        window.push(token_id)

    def banned(self) -> Collection[int]:
        """The tokens that would repeat an n-gram."""
        return self._followers.get(self._window.hash, ()) if self._window.is_full else ()
