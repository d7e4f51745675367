"""Which request rates to try, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod

_DIGITS = 1
_FINEST = 0.1
"""Rates are tenths of a request a second: the search ends where two neighbours differ in the outcome."""


class RatePlan(ABC):
    """Chooses the next rate from what became of those before."""

    def __init__(self, start: float, max_rates: int) -> None:
        self._start = start
        self._max_rates = max_rates
        self.outcomes: dict[float, bool] = {}
        self.ended_because: str | None = None

    def next_rate(self) -> float | None:
        """The rate to try next; None if there is nothing more to try."""
        if not self.outcomes:
            return self._start
        if self.ended_because:
            return None
        rate = self._following()
        if rate is None or rate in self.outcomes:
            return None
        if len(self.outcomes) >= self._max_rates:
            self.ended_because = self._without_more_rates()
            return None
        return rate

    def record(self, rate: float, *, kept_bounds: bool) -> None:
        """Say how ``rate`` went."""
        self.outcomes[rate] = kept_bounds

    def end(self, reason: str) -> None:
        """Try nothing more."""
        self.ended_because = reason

    @property
    def best(self) -> float | None:
        """The highest rate that kept the bounds."""
        return max((rate for rate, kept in self.outcomes.items() if kept), default=None)

    def _without_more_rates(self) -> str | None:
        """What there is to say about an end after ``max_rates``."""
        return None

    @abstractmethod
    def _following(self) -> float | None:
        """The rate after those of ``outcomes``, of which there is at least one."""


class RateSweep(RatePlan):
    """Rates at equal distances."""

    def __init__(self, start: float, step: float, num_rates: int) -> None:
        super().__init__(start, num_rates)
        self._step = step

    def _following(self) -> float | None:
        return self._start + self._step * len(self.outcomes)


class RateSearch(RatePlan):
    """The highest rate that keeps the bounds: doubled or halved until it lies between two, then bisected."""

    @property
    def _lowest_broken(self) -> float | None:
        return min((rate for rate, kept in self.outcomes.items() if not kept), default=None)

    def _following(self) -> float | None:
        lowest_broken = self._lowest_broken
        if lowest_broken is None:
            return max(self.outcomes) * 2
        kept = [rate for rate, is_kept in self.outcomes.items() if is_kept and rate < lowest_broken]
        if not kept:
            half = round(lowest_broken / 2, _DIGITS)
            return half if _FINEST <= half < lowest_broken else None
        middle = round((max(kept) + lowest_broken) / 2, _DIGITS)
        return middle if max(kept) < middle < lowest_broken else None

    def _without_more_rates(self) -> str:
        tried = f"the search ended after {len(self.outcomes)} rates (--num-rates)"
        if self._lowest_broken is None:
            return f"{tried}, all of which kept the bounds: higher ones may keep them too"
        return f"{tried}, below {self._lowest_broken:g} requests/s, which did not keep the bounds"
