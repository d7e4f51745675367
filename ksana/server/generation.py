"""The engine requests behind one HTTP call: submitted together, read together, and aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from ksana.engine.best_of import select_best
from ksana.errors import KsanaCode, RequestError
from ksana.types.output import FinishReason, RequestOutput
from ksana.types.request import RequestDraft

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine
    from ksana.engine.stream import RequestStream

Indexed = tuple[int, RequestOutput]


def raise_if_failed(output: RequestOutput) -> None:
    """Raise what went wrong, if ``output`` says that its request failed."""
    if output.finish_reason is FinishReason.ERROR:
        raise output.error or RequestError(
            "generation failed",
            status=500,
            type="server_error",
            code="generation_failed",
            ksana_code=KsanaCode.RUNTIME_FAILED,
        )


class Generation:
    """Runs ``drafts`` at the same time, as an asynchronous context manager.

    Entering submits them all; if one is refused, the others are aborted and the refusal is raised. Leaving aborts
    whatever still runs, so that a handler that is cancelled, or fails, leaves nothing behind in the engine.

    Read either :meth:`results`, or the deltas by ``async for index, output in generation``. A request that fails makes
    both raise :class:`RequestError`.

    Attributes:
        streams: the sequences of all drafts, one after the other; ``index`` counts them.
    """

    def __init__(self, engine: AsyncEngine, drafts: Sequence[RequestDraft]) -> None:
        self._engine = engine
        self._drafts = drafts
        self._stack = AsyncExitStack()
        self._only: AsyncIterator[RequestOutput] | None = None
        self._merged: AsyncIterator[Indexed] | None = None
        self._first: Indexed | None = None
        self.streams: list[RequestStream] = []

    async def __aenter__(self) -> Generation:
        # At once: the engine takes requests in between two steps, so one after the other would cost a step each.
        submissions = [self._submit(draft) for draft in self._drafts]
        try:
            results = await asyncio.gather(*submissions, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                self.streams += result
        except BaseException:
            await self._stack.aclose()
            raise
        if len(self.streams) == 1:
            self._only = aiter(self.streams[0])
        else:
            self._merged = self._read_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def wait_for_first(self) -> None:
        """Wait for the first output, so that an early failure can still become an HTTP status."""
        self._first = await self.__anext__()

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._only is not None:
            index, output = 0, await self._only.__anext__()
        else:
            assert self._merged is not None, "enter the context first"
            index, output = await self._merged.__anext__()
        raise_if_failed(output)
        return index, output

    async def results(self) -> list[RequestOutput]:
        """Wait for the last output of every sequence; the best ``n`` of each draft, in the order of the drafts."""
        if len(self.streams) == 1:
            result = await self.streams[0].result()
            raise_if_failed(result)
            return [result]
        last = {index: output async for index, output in self}
        results: list[RequestOutput] = []
        start = 0
        for draft in self._drafts:
            end = start + draft.sampling.num_sequences
            results += select_best([last[index] for index in range(start, end)], draft.sampling)
            start = end
        return results

    async def _submit(self, draft: RequestDraft) -> list[RequestStream]:
        # Nothing can intervene between the two: a stream that exists is one that the exit will abort.
        return [await self._stack.enter_async_context(stream) for stream in await self._engine.submit_all(draft)]

    def _read_all(self) -> AsyncIterator[Indexed]:
        # Bounded, so that a slow client makes the streams merge their outputs instead of filling the queue.
        queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(maxsize=len(self.streams))
        pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(self.streams)]
        self._stack.push_async_callback(_cancel, pumps)
        return _drain_queue(queue, len(pumps))


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[Indexed | Exception | None]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _drain_queue(queue: asyncio.Queue[Indexed | Exception | None], num_open: int) -> AsyncIterator[Indexed]:
    while num_open:
        item = await queue.get()
        if item is None:
            num_open -= 1
        elif isinstance(item, Exception):
            raise item
        else:
            yield item


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
