"""The report on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ksana.bench.metrics import Distribution, Metrics
from ksana.bench.rate_search import RatePlan, RateSearch
from ksana.cli.console import StdoutConsole

_BUSY_CLIENT = 0.8
_COUNTED_BY = {
    "ids": "token ids of the answers, exact",
    "usage": "usage, as the server counts, exact",
    "chunks": "pieces of the answers: the server tells no counts, so there may be more",
}


def render_metrics(metrics: Metrics, percentiles: Sequence[float]) -> RenderableType:
    """One run: what went through, how long it took, what failed."""
    parts: list[RenderableType] = [
        Text(f"Run, {metrics.arrival}", style="bold"),
        _facts(metrics),
        _times(metrics, percentiles),
    ]
    parts += [Text(note, style="yellow") for note in _notes(metrics)]
    for kind, (count, detail) in metrics.errors.items():
        parts.append(Text(f"{count} failed: {kind}{': ' + detail if detail else ''}", style="red"))
    return Group(*parts, Text())


def render_rates(
    runs: Sequence[Metrics], plan: RatePlan, statistic: str, keeps: Callable[[Metrics], bool]
) -> RenderableType:
    """All rates that were tried, and the best of a search; ``keeps`` says whether a run kept the bounds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rate", "requests/s", "output tokens/s", "TTFT (ms)", "latency (ms)", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    is_search = isinstance(plan, RateSearch)
    if is_search:
        table.add_column("bounds", no_wrap=True)
    for run in sorted(runs, key=lambda metrics: metrics.rate or 0):
        outcome = ["kept" if keeps(run) else "not kept"] if is_search else []
        table.add_row(
            f"{run.rate or 0:g}",
            f"{run.request_throughput:.2f}",
            f"{run.output_throughput:.1f}",
            _ms(run.ttft.statistic(statistic)),
            _ms(run.latency.statistic(statistic)),
            str(run.num_failed),
            *outcome,
        )
    title = Text(f"All rates, with the {statistic} of times", style="bold")
    if not is_search:
        return Group(title, table)
    best = f"{plan.best:g} requests/s" if plan.best is not None else "none of those tried"
    note = [Text(plan.ended_because, style="yellow")] if plan.ended_because else []
    return Group(title, table, Text(f"highest rate that keeps the bounds: {best}", style="bold"), *note)


def print_report(part: RenderableType) -> None:
    """Write to stdout."""
    StdoutConsole(highlight=False, soft_wrap=True).print(part)


def _facts(metrics: Metrics) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows: list[tuple[str, Any]] = [
        ("requests", _requests(metrics)),
        ("duration", f"{metrics.duration_s:.2f} s"),
        ("throughput", f"{metrics.request_throughput:.2f} requests/s"),
        ("", f"{metrics.output_throughput:.1f} output tokens/s, {metrics.input_throughput:.1f} input tokens/s"),
        ("tokens", f"{metrics.prompt_tokens} in{_cached(metrics)}, {metrics.output_tokens} out"),
    ]
    rows += [("counted by", _COUNTED_BY[source]) for source in metrics.count_sources]
    if metrics.finish_reasons:
        rows.append(("ended by", ", ".join(f"{reason} {count}" for reason, count in metrics.finish_reasons.items())))
    for name, value in rows:
        table.add_row(Text(name, style="cyan"), value)
    return table


def _requests(metrics: Metrics) -> str:
    parts = [f"{metrics.num_completed} complete"]
    parts += [f"{metrics.num_failed} failed"] if metrics.num_failed else []
    parts += [f"{metrics.num_interrupted} interrupted or not sent"] if metrics.num_interrupted else []
    limit = f", at most {metrics.concurrency} in flight" if metrics.concurrency else ""
    return f"{', '.join(parts)} ({metrics.arrival}{limit})"


def _cached(metrics: Metrics) -> str:
    return "" if metrics.cached_tokens is None else f" ({metrics.cached_tokens} of them cached)"


def _times(metrics: Metrics, percentiles: Sequence[float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("milliseconds", no_wrap=True)
    for heading in ["mean", *(f"p{percent:g}" for percent in percentiles), "max"]:
        table.add_column(heading, justify="right", no_wrap=True)
    times = {
        "TTFT, to first token": metrics.ttft,
        "ITL, gap between pieces": metrics.itl,
        "TPOT, per further token": metrics.tpot,
        "latency, end to end": metrics.latency,
    }
    for name, values in times.items():
        table.add_row(name, *map(_ms, _figures(values, percentiles)))
    return table


def _figures(values: Distribution, percentiles: Sequence[float]) -> list[float | None]:
    return [values.mean, *map(values.percentile, percentiles), values.percentile(100)]


def _notes(metrics: Metrics) -> list[str]:
    notes = []
    if metrics.client_load > _BUSY_CLIENT:
        notes.append(
            f"this client was busy {metrics.client_load:.0%} of the time: the server may be faster than measured; "
            "run several clients"
        )
    if metrics.num_completed and not metrics.is_streamed:
        notes.append("the answers were not streamed, so there is only the latency to see")
    return notes


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"
