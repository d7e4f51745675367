"""What a run is doing, while it does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ksana.bench.load import Load

_INTERVAL_S = 0.25


@asynccontextmanager
async def live_progress(load: Load, title: str) -> AsyncIterator[None]:
    """Show how far ``load`` is, within this context. On anything but a terminal nothing is shown."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    # No thread of rich's own: it would compete with the client for the interpreter.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task(title, total=load.result.num_planned, status="")
        ticker = asyncio.create_task(_tick(progress, bar, load))
        try:
            yield
        finally:
            ticker.cancel()


async def _tick(progress: Progress, bar: TaskID, load: Load) -> None:
    previous, then = 0, time.perf_counter()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        records, in_flight = load.result.records, load.in_flight
        tokens = sum(record.output_tokens for record in records)
        # Counts that come with the end of an answer are not there yet; its pieces are.
        tokens += sum(max(it.reader.output_tokens, len(it.reader.chunk_times)) for it in in_flight)
        now = time.perf_counter()
        speed, previous, then = max(0.0, (tokens - previous) / (now - then)), tokens, now
        num_failed = sum(record.failure is not None for record in records)
        failed = f"  [red]{num_failed} failed[/red]" if num_failed else ""
        status = f"{len(in_flight)} in flight  {speed:.0f} tokens/s{failed}"
        progress.update(bar, completed=len(records), status=status, refresh=True)
