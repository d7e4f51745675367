"""The rows of the report: which figure, against which bound of the machine, and what it must and should reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cpu_peers.engines import BLOCK_SIZE, NUM_BLOCKS
from cpu_peers.model_files import ModelShape
from cpu_peers.results import Limits, Results

Bound = Callable[[Limits, ModelShape], float]
"""What the machine allows, in the unit of the row's metric."""

INT4_GROUP = 64
"""Weights to a scale. The bound has half a byte a weight and two bytes a scale, whatever an engine's format takes."""

_MEAN_CONTEXT = 192
"""Tokens in a sequence's cache at the middle of 128 in, 128 out."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        title: for people.
        scenario: where the figure comes from.
        variant: Ksana's variant that is judged.
        metric: which of the scenario's.
        unit: ``tok/s``, ``ms``, ``s`` or ``MB``; see :data:`UNITS`.
        must: what it has to reach, all of it.
        aim: what it should reach.
        bound: of the machine, if there is a simple one.
        more_is_better: False for times and sizes.
    """

    title: str
    scenario: str
    variant: str
    metric: str
    unit: str
    must: tuple[Target, ...]
    aim: tuple[Target, ...] = ()
    bound: Bound | None = None
    more_is_better: bool = True


@dataclass(frozen=True)
class Context:
    """What targets are resolved against."""

    results: Results
    shape: ModelShape

    def bound(self, row: Row) -> float | None:
        """The row's bound on this machine, if there is one and the limits are known."""
        limits = self.results.limits
        return row.bound(limits, self.shape) if row.bound and limits else None

    def best_peer(self, row: Row) -> tuple[str, float] | None:
        """Name and median of the peer that is best at a row."""
        medians = {name: series.median for name, series in self.results.peers(row.scenario, row.metric).items()}
        if not medians:
            return None
        best = (max if row.more_is_better else min)(medians, key=lambda name: medians[name])
        return best, medians[best]


class Target(Protocol):
    """A value to reach."""

    def value(self, row: Row, context: Context) -> float | None:
        """In the unit of the row's metric; None if what it refers to was not measured."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class OfBestPeer:
    """A multiple of the best peer's median."""

    factor: float

    def value(self, row: Row, context: Context) -> float | None:
        best = context.best_peer(row)
        return None if best is None else self.factor * best[1]

    def __str__(self) -> str:
        return f"{self.factor:g} x best peer"


@dataclass(frozen=True)
class OfBound:
    """A share of the machine's bound."""

    factor: float

    def value(self, row: Row, context: Context) -> float | None:
        bound = context.bound(row)
        return None if bound is None else self.factor * bound

    def __str__(self) -> str:
        return f"{self.factor:g} x bound"


@dataclass(frozen=True)
class OfVariant:
    """A multiple of the median of one variant, in the same scenario and by default of the same metric."""

    factor: float
    variant: str
    label: str
    metric: str = ""

    def value(self, row: Row, context: Context) -> float | None:
        series = context.results.series(row.scenario, self.variant, self.metric or row.metric)
        return None if series is None else self.factor * series.median

    def __str__(self) -> str:
        return f"{self.factor:g} x {self.label}" if self.factor != 1 else self.label


@dataclass(frozen=True)
class Absolute:
    """A value that depends on no measurement, but may depend on the model."""

    amount: Callable[[ModelShape], float]
    label: str = "at most"

    def value(self, row: Row, context: Context) -> float | None:
        return self.amount(context.shape)

    def __str__(self) -> str:
        return self.label


def is_met(target: Target, row: Row, context: Context) -> bool | None:
    """Whether the row's figure reaches a target; None if one of the two was not measured."""
    figure = context.results.series(row.scenario, row.variant, row.metric)
    value = target.value(row, context)
    if figure is None or value is None:
        return None
    return figure.median >= value if row.more_is_better else figure.median <= value


def decode_bound(batch: int, context: int, bytes_per_parameter: float = 2.0) -> Bound:
    """Tokens/s if a step took no longer than its slower part: reading weights and cache, or multiplying."""

    def bound(limits: Limits, shape: ModelShape) -> float:
        read = shape.num_parameters * bytes_per_parameter + batch * context * shape.kv_bytes_per_token
        flops = 2 * shape.num_parameters * batch
        return batch / max(read / limits.read_bandwidth, flops / limits.gemm_bf16)

    return bound


def prefill_bound(length: int) -> Bound:
    """Tokens/s if all of a prompt's products ran at the peak of a large one; attention over half of it on average."""

    def bound(limits: Limits, shape: ModelShape) -> float:
        attention = 2 * 2 * (length / 2) * shape.hidden_size * shape.num_layers
        return limits.gemm_bf16 / (2 * shape.num_layer_parameters + attention)

    return bound


def _seconds(amount: float) -> Absolute:
    return Absolute(lambda shape: amount)


def _memory(more_megabytes: int) -> Absolute:
    def amount(shape: ModelShape) -> float:
        cache = NUM_BLOCKS * BLOCK_SIZE * shape.kv_bytes_per_token
        return 2 * shape.num_parameters + cache + more_megabytes * 1e6

    return Absolute(amount, f"weights + cache + {more_megabytes} MB")


def _less_than_vllm(title: str, metric: str) -> Row:
    target = OfVariant(1.0, "vllm_server", "vLLM's")
    return Row(title, "server_32", "ksana_server", metric, "ms", (target,), more_is_better=False)


def _warm_prefix(title: str, metric: str) -> Row:
    must = OfVariant(0.6, "vllm_server", "vLLM's")
    aim = OfVariant(1.1, "ksana_server", "a prompt of the new tokens only", f"short_{metric}")
    return Row(title, "warm_prefix", "ksana_server", metric, "ms", (must,), (aim,), more_is_better=False)


ROWS = (
    Row(
        "decode, 1 stream",
        *("decode_1", "ksana", "rate", "tok/s"),
        (OfVariant(0.95, "llama_cpp", "llama.cpp"),),
        (OfBound(0.95),),
        decode_bound(1, 0),  # of the weights alone: at one stream the cache is nothing beside them
    ),
    Row(
        "decode, 8 streams",
        *("decode_8", "ksana", "rate", "tok/s"),
        (OfBestPeer(1.4),),
        (OfBound(0.8),),
        decode_bound(8, _MEAN_CONTEXT),
    ),
    Row(
        "decode, 32 streams",
        *("decode_32", "ksana", "rate", "tok/s"),
        (OfBestPeer(1.25),),
        (OfBound(0.75),),
        decode_bound(32, _MEAN_CONTEXT),
    ),
    Row(
        "prefill, 1 x 1024",
        *("prefill_1x1024", "ksana", "rate", "tok/s"),
        (OfBestPeer(0.9),),
        (OfBestPeer(1.05),),
        prefill_bound(1024),
    ),
    Row(
        "prefill, 8 x 512",
        *("prefill_8x512", "ksana", "rate", "tok/s"),
        (OfBestPeer(0.9),),
        (OfBestPeer(1.05),),
        prefill_bound(512),
    ),
    Row(
        "int4 decode, 1 stream",
        *("int4_decode_1", "ksana_int4", "rate", "tok/s"),
        (OfVariant(1.6, "ksana", "own bf16"), OfVariant(1.2, "llama_cpp_q4_1", "llama.cpp Q4_1")),
        (OfBound(0.7),),
        decode_bound(1, 0, 0.5 + 2 / INT4_GROUP),
    ),
    Row(
        "server, 32 streams",
        *("server_32", "ksana_server", "rate", "tok/s"),
        (OfVariant(1.5, "vllm_server", "vLLM's"),),
        (OfVariant(0.9, "ksana", "own offline rate"),),
    ),
    _less_than_vllm("server, TTFT p50", "ttft_p50"),
    _less_than_vllm("server, TTFT p99", "ttft_p99"),
    _less_than_vllm("server, ITL p50", "itl_p50"),
    _less_than_vllm("server, ITL p99", "itl_p99"),
    _warm_prefix("warm prefix, TTFT alone", "ttft_1"),
    _warm_prefix("warm prefix, TTFT of 16 at once", "ttft_16"),
    Row(
        "ready after start",
        *("start", "ksana_demo", "start", "s"),
        (_seconds(3.0),),
        (_seconds(1.5),),
        more_is_better=False,
    ),
    Row(
        "resident memory, cache full",
        *("start", "ksana_demo", "resident", "MB"),
        (_memory(350),),
        (_memory(250),),
        more_is_better=False,
    ),
)

UNITS = {"tok/s": 1.0, "ms": 1e3, "s": 1.0, "MB": 1e-6}
"""By what a metric (tokens/s, seconds, bytes) is multiplied to be shown in a unit."""
