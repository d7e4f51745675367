"""What a comparison has measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from cpu_peers.engines import VARIANTS
from cpu_peers.scenarios import SCENARIOS, Figures


@dataclass(frozen=True)
class Limits:
    """The machine's, measured with the threads that the engines get.

    Attributes:
        method: ``native`` or ``torch``.
        read_bandwidth: bytes/s from memory.
        gemm_bf16: FLOP/s of a matrix product in bfloat16.
        gemm_f32: the same in float32.
    """

    method: str
    read_bandwidth: float
    gemm_bf16: float
    gemm_f32: float


@dataclass(frozen=True)
class Series:
    """One metric of one variant over the rounds."""

    values: list[float]

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The least."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.values)


@dataclass
class Results:
    """Everything measured so far.

    Attributes:
        scenarios: names of those that were run, whether or not anything came of it.
        limits: of the machine; None if they could not be measured.
        figures: scenario, then variant, then the figures of each round.
        failures: variant, or ``limits``: why it has no figures, or no more.
        agreement: variant: share of prompts after which its first greedy token is Ksana's.
        starts: variant: seconds from the start of the process until it was ready.
        resident: variant: bytes after its work.
    """

    scenarios: list[str] = field(default_factory=list)
    limits: Limits | None = None
    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    starts: dict[str, list[float]] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)

    def add(self, scenario: str, variant: str, figures: Figures) -> None:
        """Add the figures of one round."""
        self.figures.setdefault(scenario, {}).setdefault(variant, []).append(figures)

    def series(self, scenario: str, variant: str, metric: str) -> Series | None:
        """One metric over the rounds; None if it was not measured."""
        if metric == "start":
            values = self.starts.get(variant, [])
        elif metric == "resident":
            values = [float(self.resident[variant])] if variant in self.resident else []
        else:
            rounds = self.figures.get(scenario, {}).get(variant, [])
            values = [figures[metric] for figures in rounds if metric in figures]
        return Series(values) if values else None

    def peers(self, scenario: str, metric: str) -> dict[str, Series]:
        """The same metric of every variant in the scenario that is not Ksana's."""
        names = [name for name in SCENARIOS[scenario].variants if not VARIANTS[name].is_own]
        found = {name: self.series(scenario, name, metric) for name in names}
        return {name: series for name, series in found.items() if series is not None}
