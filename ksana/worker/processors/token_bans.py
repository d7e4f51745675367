"""Tokens that a request must not get next: by its n-grams, its bad words, and its least length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch

from ksana.types.step import NewRequestData
from ksana.worker.logits_processor import BANNED
from ksana.worker.processors.bad_words import BadWords
from ksana.worker.processors.ngram_ban import NgramBan


class Ban(Protocol):
    """What one option of one request forbids."""

    def push(self, token_id: int) -> None:
        """A token has been generated."""
        ...

    def banned(self) -> Collection[int]:
        """The tokens that must not come next. Asked once for each token: the answer costs what it is long."""
        ...


class MinTokens:
    """No token ends the text before it has so many.

    Args:
        missing: tokens.
        stop_token_ids: those that would end it.
    """

    def __init__(self, missing: int, stop_token_ids: Collection[int]) -> None:
        self._missing = missing
        self._stop_token_ids = stop_token_ids

    def push(self, token_id: int) -> None:
        """One is missing less."""
        self._missing -= 1

    def banned(self) -> Collection[int]:
        """All that would end the text, or none any more."""
        return self._stop_token_ids if self._missing > 0 else ()


class TokenBans:
    """Takes tokens out of the draw, for all options that ban some.

    Args:
        vocab_size: tokens beyond it, which a tokenizer may know and the model does not, need no ban.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bans: dict[str, list[Ban]] = {}

    def add(self, request: NewRequestData) -> bool:
        """Start a request that bans something."""
        bans = list(self._bans_of(request))
        if bans:
            self._bans[request.request_id] = bans
        return bool(bans)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._bans[request_id]

    def accept(self, request_id: str, token_id: int) -> None:
        """Tell the bans of a request about its new token."""
        for ban in self._bans[request_id]:
            ban.push(token_id)

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Ban in all rows at once."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, request_id in enumerate(request_ids):
            for ban in self._bans.get(request_id, ()):
                banned = ban.banned()
                tokens += banned
                rows += [row] * len(banned)
        if tokens:
            index = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
            logits[index] = BANNED

    def _bans_of(self, request: NewRequestData) -> Iterator[Ban]:
        sampling, tokens, num_prompt = request.sampling, request.token_ids, request.num_prompt_tokens
        if size := sampling.no_repeat_ngram_size:
            yield NgramBan(size, tokens)
        if size := sampling.encoder_no_repeat_ngram_size:
            yield NgramBan(size, tokens, num_learned=num_prompt)
        if size := sampling.decoder_no_repeat_ngram_size:
            yield NgramBan(size, tokens[num_prompt:])
        if words := [word for word in request.bad_words if max(word) < self._vocab_size]:
            yield BadWords(words, tokens)
        missing = sampling.min_tokens - (len(tokens) - num_prompt)
        if missing > 0:
            yield MinTokens(missing, [token for token in request.stop_token_ids if token < self._vocab_size])
