"""A picture of a benchmark. Needs matplotlib, of the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ksana.bench.load import LoadResult
from ksana.bench.metrics import Distribution, Metrics
from ksana.cli.output_files import check_can_plot, write_file
from ksana.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg", ".pdf")
_NUM_BINS = 40


def check_plot(path: Path) -> None:
    """Find out before measuring that no picture could be drawn.

    Raises:
        UsageError: matplotlib is not installed, or does not write files of this name.
    """
    check_can_plot()
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot: {path} must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")


def draw(path: Path, runs: Sequence[tuple[Metrics, LoadResult]], *, title: str) -> None:
    """Draw the distributions of times of every run, and what was in flight and generated over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    (ttft, itl), (in_flight, tokens) = figure.subplots(2, 2)
    for number, (metrics, result) in enumerate(runs):
        color, label = f"C{number % 10}", _label(metrics, number)
        _draw_shares(ttft, metrics.ttft if metrics.is_streamed else metrics.latency, color, label)
        _draw_shares(itl, metrics.itl, color, label)
        _draw_in_flight(in_flight, result, color)
        _draw_tokens(tokens, result, color)
    streamed = any(metrics.is_streamed for metrics, _ in runs)
    _name(ttft, "Time to first token" if streamed else "Latency", "ms", "share of requests")
    _name(itl, "Gaps between pieces", "ms", "share of gaps")
    _name(in_flight, "Requests in flight", "s", "requests")
    _name(tokens, "Pieces of answers", "s", "pieces/s")
    if len(runs) > 1:
        ttft.legend(fontsize="small")
    write_file(path, figure.savefig)


def _label(metrics: Metrics, number: int) -> str:
    return f"run {number + 1}: {metrics.arrival}"


def _draw_shares(axes: Axes, values: Distribution, color: str, label: str) -> None:
    if values.values:
        shares = np.arange(1, len(values.values) + 1) / len(values.values)
        axes.step(np.array(values.values) * 1000, shares, where="post", color=color, label=label)


def _draw_in_flight(axes: Axes, result: LoadResult, color: str) -> None:
    moments = [(record.sent_s, 1) for record in result.records] + [(record.end_s, -1) for record in result.records]
    times, changes = zip(*sorted(moments), strict=True) if moments else ((), ())
    axes.step(np.array(times) - result.start_s, np.cumsum(changes), where="post", color=color)


def _draw_tokens(axes: Axes, result: LoadResult, color: str) -> None:
    times = [time - result.start_s for record in result.records for time in record.chunk_times]
    if times and result.duration_s > 0:
        counts, edges = np.histogram(times, bins=_NUM_BINS, range=(0, result.duration_s))
        axes.stairs(counts / (edges[1] - edges[0]), edges, color=color)


def _name(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
