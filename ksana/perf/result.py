"""What came out: the file ``model_perf_result.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ksana.perf.config import RequestGroup
from ksana.perf.json_files import JsonPart


class Statistics(JsonPart):
    """Of one quantity over the counted rounds. Percentiles are interpolated between the nearest two values."""

    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistics:
        """Sum up at least one value."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(mean=float(np.mean(values)), min=min(values), max=max(values), p50=p50, p90=p90, p99=p99)


class Round(JsonPart):
    """One counted round of a batch, in milliseconds."""

    step_ms: float = Field(description="the whole step: the sum of its phases")
    phases_ms: dict[str, float] = Field(description="schedule, prepare, forward, logits, sample, update")
    operators_ms: dict[str, float] = Field(
        description="what the kernel backend says it spent in each operator; empty if it keeps no account"
    )


class BatchResult(JsonPart):
    """One batch: what it was, each counted round, and the rounds summed up."""

    name: str
    requests: list[RequestGroup]
    num_requests: int
    num_forwarding_tokens: int
    num_cached_tokens: int
    step_ms: Statistics
    phases_ms: dict[str, Statistics]
    operators_ms: dict[str, Statistics]
    rounds: list[Round] = Field(min_length=1)


class Environment(JsonPart):
    """Where the numbers come from: they mean little elsewhere."""

    ksana: str = Field(description="version")
    python: str
    torch: str
    processor: str
    usable_cpus: int = Field(description="processors that the machine or container grants")
    model: str
    architecture: str
    dtype: str
    backend: str = Field(description="name of the kernel backend")
    num_blocks: int = Field(description="usable blocks of the KV cache")
    settings: dict[str, dict[str, Any]] = Field(description="the merged settings, by section")


class PerfResult(JsonPart):
    """``model_perf_result.json``."""

    format: Literal["ksana-perf-result"] = "ksana-perf-result"
    version: Literal[1] = 1
    created: str = Field(description="UTC, ISO 8601")
    warmup_round: int
    stat_round: int
    environment: Environment
    batches: list[BatchResult] = Field(min_length=1)


def statistics_by_name(rows: Iterable[dict[str, float]]) -> dict[str, Statistics]:
    """Sum up each name over the rounds; one that a round lacks counts as 0 there."""
    found = list(rows)
    names = dict.fromkeys(name for row in found for name in row)
    return {name: Statistics.of([row.get(name, 0.0) for row in found]) for name in names}
