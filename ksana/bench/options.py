"""What a benchmark is to do, as typed values; :mod:`ksana.bench.flags` makes them from a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Api = Literal["auto", "completions", "chat", "generate"]


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A number of tokens: fixed, or drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which server, and how long to wait for it.

    Attributes:
        urls: base URLs without a path; requests go to them in turn.
        model: name to send; None takes the first that the server lists.
        request_timeout_s: seconds that a whole request may take.
        stall_timeout_s: seconds that a server may send nothing.
        wait_s: seconds to wait for a server that does not accept connections yet.
    """

    urls: tuple[str, ...] = ("http://127.0.0.1:8080",)
    api: Api = "auto"
    model: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 300.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What every request asks for; None is not sent.

    Attributes:
        ignore_eos: None decides by the workload: on where prompts are random, off where they are somebody's.
        extra_body: further fields of the body, which win over all others.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    stream: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What the requests are.

    Attributes:
        prompts: CSV or JSON-lines file of prompts; column: index, or name of the header, of the CSV's.
        trace: JSON-lines file of arrival times, lengths and shared blocks, replayed ``speedup`` times as fast.
        trace_scale: factor on the lengths of a trace; None fits them to the model's context.
        num_requests: None means 64 random ones, or all of a file.
        input_len: tokens of a random prompt, of which the first ``shared_prefix_len`` are one of ``num_prefixes``.
        output_len: most tokens to generate.
        max_input_len, max_output_len: cut what a trace asks for.
        token_range: random token ids are drawn from here, the upper end excluded.
        max_model_len: context of the model where the server does not tell.
    """

    prompts: Path | None = None
    column: int | str = 0
    trace: Path | None = None
    trace_block_size: int = 512
    trace_scale: float | None = None
    trace_duration_s: float = math.inf
    speedup: float = 1.0
    num_requests: int | None = None
    input_len: LengthRange = LengthRange(128, 128)
    output_len: LengthRange = LengthRange(64, 64)
    max_input_len: int | None = None
    max_output_len: int | None = None
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    token_range: tuple[int, int] = (1000, 10000)
    max_model_len: int | None = None
    shuffle: bool = False
    seed: int = 0
    prefix_seed: int | None = None


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """When the requests leave.

    Attributes:
        rate: requests a second; infinity sends all at once.
        burst: requests that leave together.
        poisson: exponential gaps instead of even ones.
        concurrency: most requests in flight; None for no limit.
    """

    rate: float = math.inf
    burst: int = 1
    poisson: bool = False
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class RepeatOptions:
    """How often the workload runs, and at which rates.

    Attributes:
        num_warmups: runs that are not reported.
        num_repeats: runs at every rate.
        num_rates: rates to try; None means one, or up to 12 where a bound makes it a search.
        rate_step: distance of the rates of a sweep (several rates and no bound).
        max_latency_s, max_ttft_s: bounds of the search for the highest rate.
        bound_statistic: what of latency and TTFT is bounded: ``mean`` or a percentile like ``p99``.
    """

    num_warmups: int = 0
    num_repeats: int = 1
    num_rates: int | None = None
    rate_step: float = 1.0
    max_latency_s: float = math.inf
    max_ttft_s: float = math.inf
    bound_statistic: str = "mean"

    @property
    def is_search(self) -> bool:
        """Whether there is a bound to search for."""
        return math.isfinite(self.max_latency_s) or math.isfinite(self.max_ttft_s)


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How answers are compared with stored ones; see :mod:`ksana.bench.diff`."""

    rouge_threshold: float = 0.5
    mismatch_threshold: int = 0
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results go besides the table.

    Attributes:
        details: put every request into the JSON file.
        expected: CSV file of answers to compare with.
    """

    json: Path | None = None
    csv: Path | None = None
    texts: Path | None = None
    plot: Path | None = None
    details: bool = False
    percentiles: tuple[float, ...] = (50, 90, 95, 99)
    expected: Path | None = None
    diff: DiffOptions = DiffOptions()


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything that the command line of a run says."""

    server: ServerOptions = field(default_factory=ServerOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    arrival: ArrivalOptions = field(default_factory=ArrivalOptions)
    repeat: RepeatOptions = field(default_factory=RepeatOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
