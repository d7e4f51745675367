"""Beam search: which texts go on, which are finished, and when no better one is to be expected.

The rules are those of transformers' ``generate(num_beams=...)``. It knows neither blocks nor requests.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ksana.types.output import TokenLogprobs
from ksana.types.sampling import SamplingParams
from ksana.types.step import BeamCandidates


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A text as its last token and what comes before; texts that branch share their beginning.

    Attributes:
        before: None for the empty text.
        token_id: the last token.
        log_probability: of the whole text.
        num_tokens: of the whole text.
        logprobs: of the last token, if log probabilities were asked for.
    """

    before: Hypothesis | None = None
    token_id: int = -1
    log_probability: float = 0.0
    num_tokens: int = 0
    logprobs: TokenLogprobs | None = None

    def steps(self) -> list[Hypothesis]:
        """One for each token, in order."""
        steps: list[Hypothesis] = []
        hypothesis = self
        while hypothesis.before is not None:
            steps.append(hypothesis)
            hypothesis = hypothesis.before
        return steps[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class FinishedBeam:
    """A text that has ended: at a token that ends texts, or at the length limit."""

    hypothesis: Hypothesis
    score: float


class BeamSearch:
    """Keeps the ``num_beams`` likeliest texts going, and the ``num_beams`` best that have ended.

    Args:
        sampling: width, length penalty and when to stop.
        max_tokens: a text that has so many has ended.
        stop_token_ids: tokens that end a text.

    Attributes:
        beams: texts that go on, the likeliest first. At the beginning the empty one.
        finished: texts that have ended, the best score first.
    """

    def __init__(self, sampling: SamplingParams, max_tokens: int, stop_token_ids: frozenset[int]) -> None:
        self._num_beams = sampling.num_beams
        self._length_penalty = sampling.length_penalty
        self._early_stopping: bool | Literal["never"] = sampling.early_stopping
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self.beams = [Hypothesis()]
        self.finished: list[FinishedBeam] = []

    def advance(self, candidates: Sequence[BeamCandidates]) -> list[int]:
        """Go on by a token.

        Args:
            candidates: what may follow each of ``beams``: enough of them for as many that do not end a text.

        Returns:
            For each of the new ``beams`` the index of the one that it continues.
        """
        beams, parents = [], []
        ranked = heapq.merge(*map(self._continuations, range(len(self.beams)), candidates), key=_likeliest_first)
        for rank, (parent, hypothesis) in enumerate(ranked):
            if not self._has_ended(hypothesis):
                beams.append(hypothesis)
                parents.append(parent)
            elif rank < self._num_beams:  # those behind are candidates only to have enough that go on
                self._finish(hypothesis)
            if len(beams) == self._num_beams:
                break
        self.beams = beams
        return parents

    @property
    def is_done(self) -> bool:
        """True if no text goes on, or none that does would end among the best."""
        if not self.beams:
            return True
        return len(self.finished) == self._num_beams and (self._early_stopping is True or not self._may_improve())

    def _continuations(self, parent: int, candidates: BeamCandidates) -> Iterator[tuple[int, Hypothesis]]:
        """The likeliest first."""
        before = self.beams[parent]
        for i, token in enumerate(candidates.token_ids):
            total = before.log_probability + candidates.scores[i]
            entry = candidates.logprobs[i] if candidates.logprobs else None
            yield parent, Hypothesis(before, token, total, before.num_tokens + 1, entry)

    def _has_ended(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.token_id in self._stop_token_ids or hypothesis.num_tokens >= self._max_tokens

    def _finish(self, hypothesis: Hypothesis) -> None:
        beam = FinishedBeam(hypothesis, self._score(hypothesis, hypothesis.num_tokens))
        bisect.insort_right(self.finished, beam, key=_best_first)
        del self.finished[self._num_beams :]

    def _may_improve(self) -> bool:
        """A guess, unless ``early_stopping`` is "never": the likeliest text may yet gain by its length."""
        best = self.beams[0]
        longest = self._early_stopping == "never" and self._length_penalty > 0
        return self._score(best, self._max_tokens if longest else best.num_tokens) > self.finished[-1].score

    def _score(self, hypothesis: Hypothesis, num_tokens: int) -> float:
        return float(hypothesis.log_probability / num_tokens**self._length_penalty)


def _likeliest_first(continuation: tuple[int, Hypothesis]) -> float:
    return -continuation[1].log_probability


def _best_first(beam: FinishedBeam) -> float:
    return -beam.score
