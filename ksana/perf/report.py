"""What people see: a bar while it runs, a table at the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ksana.cli.console import StdoutConsole
from ksana.perf.config import Batch
from ksana.perf.result import PerfResult

_REFRESH_INTERVAL_S = 0.2
_WIDTH_ELSEWHERE = 160


class RoundProgress:
    """A bar over all rounds, on stderr if that is a terminal. It is drawn between rounds, never during one."""

    def __init__(self, num_rounds: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._task = self._progress.add_task("loading", total=num_rounds)
        self._next_refresh = 0.0

    def advance(self, batch: Batch) -> None:
        """One more round, of ``batch``, is done."""
        self._progress.update(self._task, advance=1, description=batch.label)
        if time.monotonic() >= self._next_refresh:
            self._progress.refresh()
            self._next_refresh = time.monotonic() + _REFRESH_INTERVAL_S

    def __enter__(self) -> RoundProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


def print_result(result: PerfResult) -> None:
    """Print one line a batch."""
    table = Table(
        title=f"{result.environment.model} on {result.environment.backend}: milliseconds a step",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("batch", no_wrap=True)
    for name in ("requests", "tokens", "cached", "p50", "p90", "p99", "schedule", "tokens/s"):
        table.add_column(name, justify="right")
    for batch in result.batches:
        step = batch.step_ms
        table.add_row(
            batch.name,
            *map(str, (batch.num_requests, batch.num_forwarding_tokens, batch.num_cached_tokens)),
            *(f"{value:.2f}" for value in (step.p50, step.p90, step.p99)),
            f"{batch.phases_ms['schedule'].p50:.3f}",
            f"{batch.num_forwarding_tokens / step.p50 * 1e3:.0f}",
        )
    console = StdoutConsole()
    # What goes into a file or a pipe has no width to fit into.
    (console if console.is_terminal else StdoutConsole(width=_WIDTH_ELSEWHERE)).print(table)
