"""One picture: how every engine does at every row, as a share of the best of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpu_peers.engines import ENGINES, VARIANTS
from cpu_peers.report import Run, show
from cpu_peers.targets import ROWS, Context, Row

_COLOURS = {
    "ksana": "#c8442c",
    "llama_cpp": "#4878a8",
    "openvino": "#7a9e57",
    "vllm": "#d8a33c",
    "transformers": "#8a8a8a",
}

_BAR = 0.17
"""Thickness, where rows are 1 apart."""


def draw(context: Context, run: Run, path: Path) -> None:
    """Write a PNG. A time twice the best is half of it in the picture. Rows with a single engine are left out."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    run_rows = [row for row in ROWS if row.scenario in context.results.scenarios]
    rows = [(row, medians) for row in run_rows if len(medians := _medians(row, context)) > 1]
    if not rows:
        return
    figure = Figure(figsize=(10, 1.2 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots()
    widest = max(_draw_row(axes, -place, row, medians, context) for place, (row, medians) in enumerate(rows))
    axes.set_xlim(0, widest + 0.15)
    axes.set_yticks([-place for place in range(len(rows))], [row.title for row, _ in rows])
    axes.set_xlabel("share of the best engine; black line: bound of the machine")
    axes.set_title(f"SmolLM2-135M, {run.threads} threads, {run.machine}, {run.date}", fontsize=8)
    handles = [Patch(color=_COLOURS[name], label=engine.title) for name, engine in ENGINES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7)
    figure.savefig(path, dpi=130)


def _medians(row: Row, context: Context) -> dict[str, float]:
    """Engine to median: of Ksana the variant that is judged, of a peer its only one."""
    own = context.results.series(row.scenario, row.variant, row.metric)
    peers = context.results.peers(row.scenario, row.metric)
    found = {row.variant: own, **peers} if own else peers
    return {VARIANTS[name].engine: series.median for name, series in found.items()}


def _draw_row(axes: Any, y: float, row: Row, medians: dict[str, float], context: Context) -> float:
    """Draw the bars of a row around height ``y``; returns how far to the right they reach."""
    best = (max if row.more_is_better else min)(medians.values())
    reach = 1.0
    for number, (engine, median) in enumerate(medians.items()):
        share = median / best if row.more_is_better else best / median
        height = y + ((len(medians) - 1) / 2 - number) * _BAR
        axes.barh(height, share, 0.92 * _BAR, color=_COLOURS[engine])
        axes.text(share + 0.006, height, f"{show(row, median)} {row.unit}", va="center", fontsize=6)
    bound = context.bound(row)
    if bound is not None:
        reach = max(reach, bound / best)
        axes.plot([bound / best] * 2, [y - 0.45, y + 0.45], color="black", linewidth=1)
    return reach
