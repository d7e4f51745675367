"""The ban on words, which are sequences of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class BadWords:
    """Bans the last token of a word where those before it have just been generated, or stand at the prompt's end.

    Args:
        words: sequences of at least one token.
        tokens: of the request so far.
    """

    def __init__(self, words: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        self._always = {word[0] for word in words if len(word) == 1}
        self._beginnings: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                *beginning, last = word
                self._beginnings.setdefault(beginning[-1], []).append((beginning, last))
        self._tail = deque(tokens, maxlen=max(len(word) for word in words))

    def push(self, token_id: int) -> None:
        """A token has been generated."""
        self._tail.append(token_id)

    def banned(self) -> Collection[int]:
        """The tokens that would complete a word."""
        begun = self._beginnings.get(self._tail[-1])  # a request has at least one token
        if begun is None:
            return self._always
        tail = list(self._tail)
        return self._always.union(last for beginning, last in begun if tail[-len(beginning) :] == beginning)
