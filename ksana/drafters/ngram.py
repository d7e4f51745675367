"""Drafts out of a request's own tokens: prompts are quoted, and answers repeat themselves."""

from __future__ import annotations

from ksana.drafters.suffix_index import SuffixIndex
from ksana.types.request import Request


class NgramDrafter:
    """Proposes what followed the longest n-gram that the request's tokens end with, where it occurred before.

    Args:
        min_ngram, max_ngram: tokens that must be the same, and those that are compared. Of several places with an
            equally long match the latest is taken.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._indexes: dict[str, SuffixIndex] = {}

    def start(self, request: Request) -> None:
        """Index the prompt and the first token."""
        self._indexes[request.request_id] = SuffixIndex(request.all_token_ids, self._min_ngram)

    def propose(self, request: Request, limit: int) -> list[int]:
        """Copy from behind the longest match; where the list ends, from what has been copied (a period goes on)."""
        tokens = request.all_token_ids
        start, longest = -1, 0
        for end, length in self._indexes[request.request_id].occurrences(tokens, self._max_ngram):
            if length > longest:
                start, longest = end, length
                if length == self._max_ngram:
                    break
        if longest == 0:
            return []
        draft = tokens[start : start + limit]
        period = len(draft)
        while len(draft) < limit:
            draft.append(draft[-period])
        return draft

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        """Index the new tokens."""
        self._indexes[request.request_id].extend()

    def finish(self, request: Request) -> None:
        """Drop the index."""
        del self._indexes[request.request_id]
