"""From records to figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ksana.bench.load import LoadResult
from ksana.bench.records import CountSource, RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds that something took, as often as it was seen.

    Attributes:
        values: ascending.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Sort what was seen; None was not."""
        return cls(tuple(sorted(value for value in values if value is not None)))

    @property
    def mean(self) -> float | None:
        """None if there is nothing."""
        return float(np.mean(self.values)) if self.values else None

    def percentile(self, percent: float) -> float | None:
        """The value below which ``percent`` % lie, between two neighbours in proportion; None if there is nothing."""
        return float(np.percentile(self.values, percent)) if self.values else None

    def statistic(self, name: str) -> float | None:
        """``mean`` or a percentile like ``p99``."""
        return self.mean if name == "mean" else self.percentile(float(name.removeprefix("p")))


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one run, of complete answers only. Times are in seconds.

    Attributes:
        rate: requests a second that were to be sent; infinity for all at once, None for times of the workload's own.
        ttft: from sending to the first piece with tokens.
        itl: every gap between two such pieces. A server that sends several tokens in one piece has fewer, longer gaps.
        tpot: of each answer, the time after the first piece over the tokens after the first.
        latency: from sending to the end.
        count_sources: how many answers had their tokens counted in which way.
        errors: how many requests failed of what, with an example of each.
        client_load: cores that this process kept busy; near 1 it is the client that was measured.
    """

    rate: float | None
    concurrency: int | None
    burst: int
    duration_s: float
    num_planned: int
    num_completed: int
    num_failed: int
    num_interrupted: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    prompt_chars: int
    output_chars: int
    client_load: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    latency: Distribution
    count_sources: dict[CountSource, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def request_throughput(self) -> float:
        """Complete answers a second."""
        return self._per_second(self.num_completed)

    @property
    def input_throughput(self) -> float:
        """Prompt tokens a second."""
        return self._per_second(self.prompt_tokens)

    @property
    def output_throughput(self) -> float:
        """Generated tokens a second."""
        return self._per_second(self.output_tokens)

    @property
    def arrival(self) -> str:
        """In words, when the requests left."""
        if self.rate is None:
            return "at their own times"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"

    @property
    def is_streamed(self) -> bool:
        """Whether answers came in pieces."""
        return bool(self.ttft.values)

    def _per_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def measure(result: LoadResult, *, rate: float | None, burst: int, concurrency: int | None) -> Metrics:
    """Sum up a run."""
    done = [record for record in result.records if record.failure is None]
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    duration_s = result.duration_s
    return Metrics(
        rate=rate,
        concurrency=concurrency,
        burst=burst,
        duration_s=duration_s,
        num_planned=result.num_planned,
        num_completed=len(done),
        num_failed=len(result.records) - len(done),
        num_interrupted=result.num_planned - len(result.records),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.output_tokens for record in done),
        prompt_chars=sum(record.prompt_chars or 0 for record in done),
        output_chars=sum(len(record.text) for record in done),
        client_load=result.client_cpu_s / duration_s if duration_s > 0 else 0.0,
        ttft=Distribution.of(record.ttft_s for record in done),
        itl=Distribution.of(gap for record in done for gap in record.gaps_s),
        tpot=Distribution.of(record.tpot_s for record in done),
        latency=Distribution.of(record.latency_s for record in done),
        count_sources=dict(Counter(record.count_source for record in done)),
        finish_reasons=dict(Counter(record.finish_reason or "unknown" for record in done)),
        errors=_count_errors(result.records),
    )


def _count_errors(records: Sequence[RequestRecord]) -> dict[str, tuple[int, str]]:
    errors: dict[str, tuple[int, str]] = {}
    for record in records:
        if record.failure is not None:
            count, detail = errors.get(record.failure.kind, (0, record.failure.detail))
            errors[record.failure.kind] = (count + 1, detail)
    return dict(sorted(errors.items(), key=lambda item: -item[1][0]))
