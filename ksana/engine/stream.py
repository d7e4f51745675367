"""The consumer's end of a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, cast

from ksana.engine.context import ProcessingContext
from ksana.engine.output_processor import OutputDelta
from ksana.errors import EngineDeadError, RequestError
from ksana.plugin.maybe_await import call_in_order
from ksana.types.capture import CapturedRows
from ksana.types.output import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from ksana.types.request import Request, RequestDraft

if TYPE_CHECKING:
    import pluggy

logger = logging.getLogger(__name__)

_BROKEN_OFF = (FinishReason.ABORT, FinishReason.ERROR)
"""A request that ends so may not have computed its prompt."""


class RequestStream:
    """Outputs of one request, as an async iterator.

    A slow consumer gets several steps merged into one output, so nothing piles up. Use it as a context manager: leaving
    it, for whatever reason, aborts a request that has not ended.

    All methods belong to the event loop that submitted the request.
    """

    def __init__(
        self,
        request: Request,
        draft: RequestDraft,
        context: ProcessingContext,
        plugins: pluggy.PluginManager,
        abort: Callable[[str], None],
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.all_token_ids[: request.num_prompt_tokens]
        self.loop = asyncio.get_running_loop()
        self._draft = draft
        self._context = context
        self._abort = abort
        self._plugins = plugins
        self._pending: OutputDelta | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._admitted: asyncio.Future[None] = self.loop.create_future()
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._captured: list[CapturedRows] = []
        self._has_captured = False
        self._early_stats = RequestStats(arrival_time=request.arrival_time)

    async def wait_until_admitted(self) -> None:
        """Returns once the engine has queued the request. Raises RequestError if it has refused it."""
        await self._admitted

    def abort(self) -> None:
        """End the request; its last output says ``abort``. Never blocks; does nothing if it has ended."""
        self._abort(self.request_id)

    async def result(self) -> RequestOutput:
        """Wait for the end. Returns the last output, whose ``text`` and ``token_ids`` are complete."""
        last = None
        async for output in self:
            last = output
        assert last is not None, "the stream had been read to its end before"
        return last

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises EngineDeadError if the engine has stopped without ending the request."""
        if self._closed:
            raise StopAsyncIteration
        if self._pending is None and self._dead is None:
            await self._wait_for_news()
        if self._dead is not None:
            self._closed = True
            raise self._dead
        delta, self._pending = self._pending, None
        assert delta is not None, "two consumers read one stream"
        output = self._to_output(delta)
        if output.finished:
            self._closed = True
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                await self._run_postprocess(output)
        return output

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            self.abort()

    # -- called by the engine, on this stream's loop -----------------------------------------------------------

    def set_admitted(self, error: RequestError | None) -> None:
        """The engine has queued, or refused, the request."""
        if self._admitted.done():
            return
        if error is None:
            self._admitted.set_result(None)
        else:
            self._closed = True
            self._refuse(error)

    def push(self, delta: OutputDelta) -> None:
        """Take over ``delta``, merged into what the consumer has not taken yet."""
        pending = self._pending
        if pending is None:
            self._pending = delta
        else:
            pending.text += delta.text
            pending.token_ids += delta.token_ids
            pending.logprobs += delta.logprobs
            pending.finish_reason = delta.finish_reason
            pending.stop_reason = delta.stop_reason
            pending.score = delta.score
            pending.error = delta.error
            pending.stats = delta.stats
            pending.captured = delta.captured
        self._wake()

    def set_dead(self, error: EngineDeadError) -> None:
        """The engine has stopped without ending the request."""
        self._dead = error
        if not self._admitted.done():
            self._refuse(error)
        self._wake()

    def _refuse(self, error: RequestError | EngineDeadError) -> None:
        self._admitted.set_exception(error)
        self._admitted.exception()  # or asyncio would complain of each sequence that nobody waits for

    async def _wait_for_news(self) -> None:
        # A bare future: an asyncio.Event costs several times as much, and this happens once a token.
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _to_output(self, delta: OutputDelta) -> RequestOutput:
        self._text += delta.text
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        if delta.captured is not None and not self._has_captured and delta.finish_reason not in _BROKEN_OFF:
            self._take_captured(delta.captured.results())
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            text_delta=delta.text,
            token_ids_delta=delta.token_ids,
            text=self._text,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            captured=self._captured,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            score=delta.score,
            error=delta.error,
            stats=delta.stats or self._early_stats,
        )

    def _take_captured(self, results: list[CapturedRows]) -> None:
        """The prompt is computed, so all is there; what ``prompt_logprobs`` asks for comes last."""
        self._has_captured = True
        if self._draft.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *cast("list[TokenLogprobs]", results.pop())]
        self._captured = results

    async def _run_postprocess(self, output: RequestOutput) -> None:
        try:
            await call_in_order(
                self._plugins, "ksana_postprocess", output=output, draft=self._draft, context=self._context
            )
        except RequestError as error:
            output.finish_reason, output.error = FinishReason.ERROR, error
        except Exception:
            logger.exception("a plugin's ksana_postprocess failed for request %s", self.request_id)
            output.finish_reason = FinishReason.ERROR
            output.error = RequestError(
                "a plugin failed; the server's log says why", status=500, type="server_error", code="plugin_error"
            )
