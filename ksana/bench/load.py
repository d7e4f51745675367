"""One run: requests that leave when they are due, and what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from ksana.bench.client import Exchange, send
from ksana.bench.records import RequestRecord


@dataclass(slots=True)
class LoadResult:
    """What a run has seen.

    Attributes:
        records: of the requests that ended, in the order of the workload.
        num_planned: requests that were to be sent.
        start_s: when the run began, in seconds of :func:`time.perf_counter`.
        client_cpu_s: seconds of a core that this process spent.
        stopped_s: when the run was given up, if it was.
    """

    num_planned: int
    start_s: float
    records: list[RequestRecord] = field(default_factory=list)
    client_cpu_s: float = 0.0
    stopped_s: float | None = None

    @property
    def duration_s(self) -> float:
        """From the start to the end of the last request, or until the run was given up."""
        end_s = self.stopped_s or max((record.end_s for record in self.records), default=self.start_s)
        return end_s - self.start_s


class Load:
    """A run in progress, which a display may look at.

    Attributes:
        stop: set it to send nothing more and give up what is in flight.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        exchanges: Sequence[Exchange],
        *,
        concurrency: int | None,
        stop: asyncio.Event,
    ) -> None:
        self._session = session
        self._exchanges = exchanges
        self._seats = asyncio.Semaphore(concurrency or max(1, len(exchanges)))
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight: dict[int, Exchange] = {}
        self.stop = stop
        self.result = LoadResult(num_planned=len(exchanges), start_s=time.perf_counter())

    @property
    def in_flight(self) -> Sequence[Exchange]:
        """Requests that were sent and have not ended; their readers know how far they are."""
        return list(self._in_flight.values())

    async def run(self) -> LoadResult:
        """Send everything and wait for the answers, or until ``stop`` is set."""
        cpu_s = time.process_time()
        self.result.start_s = time.perf_counter()
        sender = asyncio.create_task(self._send_all())
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait([sender, stopped], return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                self.result.stopped_s = time.perf_counter()
        finally:
            await _cancel([sender, stopped, *self._tasks])
        self.result.client_cpu_s = time.process_time() - cpu_s
        self.result.records.sort(key=lambda record: record.index)
        return self.result

    async def _send_all(self) -> None:
        for exchange in self._exchanges:
            due = self.result.start_s + exchange.offset_s
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await self._seats.acquire()
            self._tasks.append(asyncio.create_task(self._send(exchange)))
        await asyncio.gather(*self._tasks)

    async def _send(self, exchange: Exchange) -> None:
        self._in_flight[exchange.index] = exchange
        try:
            self.result.records.append(await send(self._session, exchange))
        finally:
            del self._in_flight[exchange.index]
            self._seats.release()


async def _cancel(tasks: Sequence[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
