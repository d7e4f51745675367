"""The results for people: a table for the terminal, the same as Markdown for the documentation, and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from cpu_peers.engines import BLOCK_SIZE, ENGINES, NUM_BLOCKS, VARIANTS
from cpu_peers.results import Series
from cpu_peers.targets import ROWS, UNITS, Context, Row, Target, is_met

HEADINGS = ("scenario", "Ksana (low to high)", "best peer", "ratio", "of the bound", "must", "aim")

BEGIN = "<!-- written by benchmarks/compare_cpu.py: begin -->"
END = "<!-- written by benchmarks/compare_cpu.py: end -->"


@dataclasses.dataclass(frozen=True)
class Run:
    """How the figures came about."""

    date: str
    machine: str
    threads: int
    rounds: int
    versions: str

    @classmethod
    def now(cls, threads: int, rounds: int) -> Run:
        """Today, on this machine."""
        pins = [pin for engine in ENGINES.values() for pin in engine.requirements]
        own = [f"{name}=={metadata.version(name)}" for name in ("ksana", "torch", "transformers")]
        return cls(datetime.now().date().isoformat(), machine(), threads, rounds, ", ".join(own + pins))


def machine() -> str:
    """Processor, its matrix extensions, cores, memory."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    extensions = [e for e in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if e in facts.get("flags", "").split()]
    memory = psutil.virtual_memory().total / 2**30
    name = facts.get("model name", platform.processor() or platform.machine())
    return f"{name} ({', '.join(extensions) or 'no vector extensions known'}), {os.cpu_count()} cores, {memory:.0f} GiB"


def show(row: Row, value: float) -> str:
    """A metric in the row's unit, to three figures or so."""
    scaled = value * UNITS[row.unit]
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}"


def table(context: Context) -> list[tuple[str, ...]]:
    """The cells of every row whose scenario was run, in the order of :data:`HEADINGS`."""
    return [_cells(row, context) for row in _rows(context)]


def _rows(context: Context) -> list[Row]:
    return [row for row in ROWS if row.scenario in context.results.scenarios]


def _cells(row: Row, context: Context) -> tuple[str, ...]:
    own = context.results.series(row.scenario, row.variant, row.metric)
    best = context.best_peer(row)
    bound = context.bound(row)
    return (
        row.title,
        f"{show(row, own.median)} {row.unit} ({show(row, own.low)} to {show(row, own.high)})"
        if own
        else "not measured",
        f"{show(row, best[1])} {VARIANTS[best[0]].label}" if best else "-",
        f"{own.median / best[1]:.2f}" if own and best else "-",
        f"{own.median / bound:.2f} of {show(row, bound)}" if own and bound else "-",
        "; ".join(_verdict(target, row, context) for target in row.must) or "-",
        "; ".join(_verdict(target, row, context) for target in row.aim) or "-",
    )


def _verdict(target: Target, row: Row, context: Context) -> str:
    met = is_met(target, row, context)
    value = target.value(row, context)
    word = {True: "met", False: "missed", None: "unknown"}[met]
    return f"{word}: {target}" + (f", {show(row, value)} {row.unit}" if value is not None else "")


def engine_table(context: Context) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and cells of every engine's medians, with low and high."""
    rows = _rows(context)
    names = [name for name in VARIANTS if any(_series(row, name, context) for row in rows)]
    cells = []
    for row in rows:
        series = [_series(row, name, context) for name in names]
        cells.append((f"{row.title}, {row.unit}", *(_range(row, one) for one in series)))
    return ("", *(VARIANTS[name].label for name in names)), cells


def _series(row: Row, name: str, context: Context) -> Series | None:
    return context.results.series(row.scenario, name, row.metric)


def _range(row: Row, series: Series | None) -> str:
    if series is None:
        return ""
    if len(series.values) == 1:
        return show(row, series.median)
    return f"{show(row, series.median)} ({show(row, series.low)}-{show(row, series.high)})"


def notes(context: Context) -> list[str]:
    """One line each: the limits, who failed, who computes something else."""
    results = context.results
    lines = []
    if results.limits:
        lines.append(
            f"Limits of the machine: {results.limits.read_bandwidth / 1e9:.1f} GB/s read, "
            f"{results.limits.gemm_bf16 / 1e9:.0f} GFLOP/s in bfloat16, {results.limits.gemm_f32 / 1e9:.0f} in float32 "
            f"(measured with {results.limits.method} code)."
        )
    if results.agreement:
        shares = ", ".join(f"{VARIANTS[name].label} {share:.0%}" for name, share in results.agreement.items())
        lines.append(f"First greedy token after 32 random prompts equal to Ksana's in bfloat16: {shares}.")
    if "start" in results.scenarios:
        lines.append(
            f"Memory includes the KV cache: {NUM_BLOCKS * BLOCK_SIZE} tokens in Ksana and llama.cpp, 1 GiB in OpenVINO "
            "GenAI and vLLM, nothing lasting in transformers."
        )
    lines += [f"Failed: {name}: {reason.partition(' (log: ')[0]}" for name, reason in results.failures.items()]
    return lines


def print_report(context: Context, console: Console) -> None:
    """Write both tables and the notes to a terminal or file."""
    _print_table(console, HEADINGS, table(context))
    _print_table(console, *engine_table(context))
    for line in notes(context):
        console.print(line, markup=False, highlight=False)


def _print_table(console: Console, headings: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    drawn = Table(*headings)
    for row in cells:
        drawn.add_row(*row)
    console.print(drawn)


def as_json(context: Context, run: Run) -> str:
    """Everything: raw figures of each round, and the verdict on each row."""
    document: dict[str, Any] = {
        "run": dataclasses.asdict(run),
        "results": dataclasses.asdict(context.results),
        "rows": [dict(zip(HEADINGS, cells, strict=True)) for cells in table(context)],
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(context: Context, run: Run, picture: str) -> str:
    """The block for the documentation, markers included."""
    intro = (
        f"{run.date}, {run.machine}; SmolLM2-135M in bfloat16, {run.threads} threads, medians of {run.rounds} rounds "
        f"in which the engines take turns; {run.versions}. "
        "Decode leaves the prefill out; the bound is what the measured limits of the machine allow."
    )
    parts = [BEGIN, intro, f"![Ksana and its peers as shares of the best]({picture})"]
    parts += [_markdown_table(HEADINGS, table(context)), _markdown_table(*engine_table(context))]
    parts += ["\n".join(f"- {line}" for line in notes(context)), END]
    return "\n\n".join(parts)


def _markdown_table(headings: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_block(page: Path, block: str) -> None:
    """Put the block between its markers in a page, or at the page's end if it has none."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    page.write_text(f"{before}{block}{after}" if begin and end else f"{text.rstrip()}\n\n{block}\n")
