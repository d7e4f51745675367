"""A benchmark from beginning to end: find the server, warm up, run at every rate."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ksana.bench.client import Exchange, open_session
from ksana.bench.discovery import ServerInfo, discover
from ksana.bench.load import Load, LoadResult
from ksana.bench.metrics import Metrics, measure
from ksana.bench.options import BenchOptions, RepeatOptions
from ksana.bench.progress import live_progress
from ksana.bench.prompt_files import read_prompts
from ksana.bench.protocols import PROTOCOLS, Protocol, is_messages, is_token_ids
from ksana.bench.rate_search import RatePlan, RateSearch, RateSweep
from ksana.bench.trace import TraceWorkload, read_trace
from ksana.bench.workload import BenchRequest, ListWorkload, RandomWorkload, Workload
from ksana.cli.startup import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import aiohttp

_SEARCH_START = 1.0
_MAX_SEARCH_RATES = 12


@dataclass(slots=True)
class BenchResult:
    """Everything that was measured.

    Attributes:
        runs: in the order of time.
        plan: rates tried and their outcomes.
        interrupted: whether Ctrl-C ended it early.
    """

    server: ServerInfo
    workload: Workload
    plan: RatePlan
    runs: list[tuple[Metrics, LoadResult]] = field(default_factory=list)
    interrupted: bool = False


async def run_benchmark(options: BenchOptions, on_run: Callable[[Metrics], None]) -> BenchResult:
    """Measure as ``options`` say, and call ``on_run`` after every run that counts.

    Ctrl-C ends the run in progress, which then is the last one and counts with what it has. A second one ends the
    process at once.

    Raises:
        UsageError: there is no server, or the workload does not go with it.
    """
    server = options.server
    session = open_session(
        server.headers, request_timeout_s=server.request_timeout_s, stall_timeout_s=server.stall_timeout_s
    )
    async with session:
        info = await discover(session, server)
        benchmark = _Benchmark(session, options, info)
        with _interrupts(benchmark.stop):
            return await benchmark.run(on_run)


class _Benchmark:
    def __init__(self, session: aiohttp.ClientSession, options: BenchOptions, info: ServerInfo) -> None:
        self._session = session
        self._options = options
        self.stop = asyncio.Event()
        protocol, workload = make_workload(options, info)
        sampling = options.sampling
        if sampling.ignore_eos is None:
            sampling = replace(sampling, ignore_eos=workload.ignores_eos)
        self._protocol = protocol(sampling, info.model)
        info = replace(info, api=self._protocol.name)
        self._result = BenchResult(info, workload, make_rate_plan(options.repeat, options.arrival.rate))
        self._num_draws = 0

    async def run(self, on_run: Callable[[Metrics], None]) -> BenchResult:
        repeat, plan = self._options.repeat, self._result.plan
        for number in range(repeat.num_warmups):
            if not self.stop.is_set():
                await self._run_once(self._options.arrival.rate, f"warm-up {number + 1} of {repeat.num_warmups}")
        while not self.stop.is_set() and (rate := plan.next_rate()) is not None:
            kept = [await self._run_and_report(rate, number, on_run) for number in range(repeat.num_repeats)]
            if not self.stop.is_set():
                plan.record(rate, kept_bounds=all(kept))
                self._end_search_without_load(rate)
        self._result.interrupted = self.stop.is_set()
        return self._result

    async def _run_and_report(self, rate: float, number: int, on_run: Callable[[Metrics], None]) -> bool:
        if self.stop.is_set():
            return False
        repeat = self._options.repeat
        of = f", {number + 1} of {repeat.num_repeats}" if repeat.num_repeats > 1 else ""
        metrics, result = await self._run_once(rate, f"{rate:g} requests/s{of}" if math.isfinite(rate) else f"run{of}")
        self._result.runs.append((metrics, result))
        on_run(metrics)
        return keeps_bounds(metrics, repeat)

    def _end_search_without_load(self, rate: float) -> None:
        """Rates beyond the one at which all requests are in flight at once can only give the same figures."""
        metrics, _ = self._result.runs[-1]
        mean_s = metrics.latency.mean
        plan = self._result.plan
        if isinstance(plan, RateSearch) and plan.outcomes[rate] and mean_s and metrics.num_planned / rate < mean_s:
            plan.end(
                f"at {rate:g} requests/s all {metrics.num_planned} requests were in flight at once, and kept the "
                "bounds: use more requests (--num-requests) to tell higher rates apart"
            )

    async def _run_once(self, rate: float, title: str) -> tuple[Metrics, LoadResult]:
        arrival = replace(self._options.arrival, rate=rate)
        requests = self._result.workload.requests(self._num_draws, arrival)
        self._num_draws += 1
        exchanges = [self._exchange(index, request) for index, request in enumerate(requests)]
        load = Load(self._session, exchanges, concurrency=arrival.concurrency, stop=self.stop)
        async with live_progress(load, title):
            result = await load.run()
        own_times = self._result.workload.has_own_arrivals
        return measure(
            result, rate=None if own_times else rate, burst=arrival.burst, concurrency=arrival.concurrency
        ), result

    def _exchange(self, index: int, request: BenchRequest) -> Exchange:
        urls, prompt = self._options.server.urls, request.prompt
        return Exchange(
            index=index,
            url=urls[index % len(urls)] + self._protocol.path,
            body=self._protocol.encode(request),
            reader=self._protocol.reader(),
            offset_s=request.offset_s,
            prompt_tokens=len(prompt) if is_token_ids(prompt) else None,
            prompt_chars=len(prompt) if isinstance(prompt, str) else None,
        )


def make_workload(bench: BenchOptions, info: ServerInfo) -> tuple[type[Protocol], Workload]:
    """Make the workload that ``bench`` describes, fit for a server, and choose the API that takes it.

    Raises:
        UsageError: a file cannot be used, or the prompts do not fit the model.
    """
    protocol = PROTOCOLS[info.api]
    options = bench.workload
    options = replace(options, max_model_len=options.max_model_len or info.max_model_len)
    if options.trace is not None:
        lines = read_trace(options.trace, duration_s=options.trace_duration_s, limit=options.num_requests)
        return protocol, TraceWorkload(lines, options, as_text=not protocol.takes_token_ids)
    if options.prompts is None:
        return protocol, RandomWorkload(options, as_text=not protocol.takes_token_ids)
    prompts = read_prompts(options.prompts, options.column)
    has_messages = any(is_messages(prompt) for prompt, _ in prompts)
    if has_messages and not protocol.takes_messages and bench.server.api == "auto":
        protocol = PROTOCOLS["chat"]
    return protocol, ListWorkload(prompts, options, source=str(options.prompts))


def make_rate_plan(repeat: RepeatOptions, rate: float) -> RatePlan:
    """A search where there is a bound, otherwise a sweep, of one rate by default."""
    if repeat.is_search:
        start = _SEARCH_START if math.isinf(rate) else rate
        return RateSearch(start, repeat.num_rates or _MAX_SEARCH_RATES)
    return RateSweep(rate, repeat.rate_step, repeat.num_rates or 1)


def keeps_bounds(metrics: Metrics, repeat: RepeatOptions) -> bool:
    """Whether a run answered everything within the bounds."""
    latency = metrics.latency.statistic(repeat.bound_statistic)
    ttft = metrics.ttft.statistic(repeat.bound_statistic)
    return (
        metrics.num_completed == metrics.num_planned
        and (latency is None or latency <= repeat.max_latency_s)
        and (ttft is None or ttft <= repeat.max_ttft_s)
    )


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets ``stop``; the second one ends the process at once, wherever it is."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        if stop.is_set():
            # An exception would meet an event loop that is being closed, which has a lot to say about it.
            os._exit(EXIT_INTERRUPTED)
        stop.set()

    # Only the main thread gets signals, and not every event loop hands them on.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        if not stop.is_set():  # else for as long as there is the loop
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)
