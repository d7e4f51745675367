"""Structured output: tokens that a grammar does not let through are banned."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ksana.text.grammar import Grammar, GrammarMatcher
from ksana.types.step import NewRequestData
from ksana.worker.logits_processor import BANNED


class GrammarProcessor:
    """:class:`ksana.worker.logits_processor.LogitsProcessor` for ``SamplingParams.grammar``.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self._vocab_size = vocab_size
        self._texts: dict[str, _Text] = {}

    def add(self, request: NewRequestData) -> bool:
        """Begin a text; one that a preemption has interrupted is read again."""
        if request.grammar is None:
            return False
        text = _Text(request.grammar, request.sampling.grammar_after, request.stop_token_ids)
        for token in request.token_ids[request.num_prompt_tokens :]:
            text.accept(token)
        self._texts[request.request_id] = text
        return True

    def remove(self, request_id: str) -> None:
        """Forget a text."""
        del self._texts[request_id]

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Ban what may not come next."""
        for row, request_id in zip(logits, request_ids, strict=True):
            text = self._texts.get(request_id)
            if text is None:
                continue
            if text.is_free:
                row[text.stop_token_ids] = BANNED
            else:
                _ban(row, self._banned(text.matcher))

    def accept(self, request_id: str, token_id: int) -> None:
        """A text goes on."""
        self._texts[request_id].accept(token_id)

    def _banned(self, matcher: GrammarMatcher) -> np.ndarray:
        """What may not come next, bool [vocab_size]."""
        matcher.fill_mask(self._mask)
        np.invert(self._mask, out=self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)


def _ban(row: torch.Tensor, banned: np.ndarray) -> None:
    if row.device.type == "cpu":  # a sixth of the time that torch takes
        np.copyto(row.numpy(), BANNED, where=banned)
    else:
        row.masked_fill_(torch.from_numpy(banned).to(row.device), BANNED)


class _Text:
    """How far the output of a request is.

    Args:
        grammar: holds from the end of the first ``after`` in the output on, or from the beginning if that is empty.
        stop_token_ids: what must not end the output before the grammar holds.
    """

    def __init__(self, grammar: Grammar, after: tuple[int, ...], stop_token_ids: frozenset[int]) -> None:
        self.matcher = grammar.matcher()
        self.is_free = bool(after)
        self.stop_token_ids = sorted(stop_token_ids)
        self._after = after
        self._latest: deque[int] = deque(maxlen=len(after))

    def accept(self, token_id: int) -> None:
        """One token more."""
        if not self.is_free:
            self.matcher.accept(token_id)
            return
        self._latest.append(token_id)
        self.is_free = tuple(self._latest) != self._after
