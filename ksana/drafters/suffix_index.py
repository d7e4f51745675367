"""Where the end of one list of tokens occurs in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MAX_OCCURRENCES = 32
"""That a search looks at, the latest first."""

_MAX_TOKENS = 32768
"""That are indexed of what is there at the start, the latest ones. About 200 bytes each."""


class SuffixIndex:
    """Finds earlier occurrences of an n-gram in a list of tokens, in constant time.

    For each n-gram there is the place of its latest occurrence, and for each place that of the same n-gram before it.

    Args:
        tokens: to search in. The list may grow at its end.
        n: length of the n-grams.
    """

    def __init__(self, tokens: list[int], n: int) -> None:
        self._tokens = tokens
        self._n = n
        self._first = max(n, len(tokens) - _MAX_TOKENS)
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []
        self.extend()

    def extend(self) -> None:
        """Take in what has been added to the list. Its very end is left out: nothing follows it yet."""
        tokens, n, latest, previous = self._tokens, self._n, self._latest, self._previous
        for end in range(self._first + len(previous), len(tokens)):
            ngram = tuple(tokens[end - n : end])
            previous.append(latest.get(ngram, -1))
            latest[ngram] = end

    def occurrences(self, context: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
        """Where the list has what ``context`` ends with: at least n tokens, of which up to ``max_length`` are compared.

        Yields:
            (index of the token that followed, number of tokens before it that are as in ``context``), the latest first.
        """
        tokens, n = self._tokens, self._n
        end = self._latest.get(tuple(context[-n:]), -1)
        for _ in range(_MAX_OCCURRENCES):
            if end < 0:
                return
            longest = min(max_length, end, len(context))
            length = n
            while length < longest and tokens[end - length - 1] == context[-length - 1]:
                length += 1
            yield end, length
            end = self._previous[end - self._first]
