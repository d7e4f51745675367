"""The engine's steps: schedule, compute, sample, text. Owned by one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ksana.engine.compute_thread import ComputeThread
from ksana.engine.output_processor import OutputDelta, OutputProcessor
from ksana.engine.pipeline import Executor, StepPipeline
from ksana.engine.stats import EngineStats
from ksana.engine.trace import NoTrace
from ksana.errors import KsanaCode, RequestError
from ksana.scheduling import RequestUpdate, Scheduler, no_token_left_error
from ksana.types.request import Request
from ksana.types.step import SchedulerOutput

if TYPE_CHECKING:
    import pluggy

    from ksana.kv_events.recorder import KVEventRecorder

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, executor and output processor.

    Without a thread to compute on, each step is scheduled, computed and processed before the next one. With one, a step
    is scheduled while the one before it computes, and its tokens are processed while the one after it does: the same
    tokens, and a stop is found when one token too many is already under way, which is dropped.

    Args:
        hook: for ``ksana_request_finished``.
        check_integrity: verify the block tables whenever the last request has ended.
        compute_thread: where the executor computes; it was made there too. The core ends it.
        trace: hears of requests and steps.
        events: what the scheduler's KV cache tells of its content; told after every step.
        closing: called in order when the core is closed: what else has threads, files or connections.

    Attributes:
        stats: what has been counted so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        outputs: OutputProcessor,
        hook: pluggy.HookRelay,
        *,
        check_integrity: bool = False,
        compute_thread: ComputeThread | None = None,
        trace: NoTrace | None = None,
        events: KVEventRecorder | None = None,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats(scheduler)
        self._outputs = outputs
        self._hook = hook
        self._check_integrity = check_integrity
        self._trace = trace or NoTrace()
        self._events = events
        self._closing = closing
        self._only_transfers = False
        self._pipeline = StepPipeline(executor, compute_thread, self._trace)

    def has_work(self) -> bool:
        """True if :meth:`step` would do something."""
        return len(self._pipeline) > 0 or self.scheduler.has_work()

    @property
    def only_transfers(self) -> bool:
        """True if there was nothing to compute in the last step: what is waited for is under way elsewhere."""
        return self._only_transfers

    def add(self, request: Request) -> None:
        """Queue a request and those that wait for its prompt. Raises RequestError if there is no place for them."""
        self._outputs.add(request)
        try:
            self.scheduler.add_request(request)
        except RequestError:
            self._outputs.discard(request)
            raise
        for sequence in request.sequences:
            self._trace.request_added(sequence)

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request; returns its last delta, or [] if it had ended already."""
        request = self.scheduler.abort(request_id)
        return [self._finish(request)] if request else []

    def step(self) -> list[OutputDelta]:
        """Schedule a step if there is something to compute, and take in the oldest one that is due.

        An error in the computation ends the requests that run, and nothing else.

        Returns:
            What is new about requests.
        """
        deltas = [self._finish(request) for request in self.scheduler.expire_waiting()]
        started, started_s = self._trace.now(), time.monotonic()
        step = self.scheduler.schedule()
        if not step.is_empty:
            if not step.only_transfers:
                self._trace.step_scheduled(started, step, self.scheduler)
                self.stats.step_scheduled(started_s, step)
            self._pipeline.submit(step)
        if self._pipeline.is_full or (step.only_transfers and len(self._pipeline)):
            deltas += self._collect()
        self._only_transfers = step.only_transfers and not len(self._pipeline)
        if self._events is not None:
            self._events.flush()
        return deltas

    def close(self) -> None:
        """Stop computing, after the step that is being computed. Requests that have not ended are left as they are."""
        self._pipeline.close()
        for close in self._closing:
            try:
                close()
            except Exception:
                logger.exception("something did not close")
        if self._events is not None:
            self._events.close()
        self._trace.close()

    def _collect(self) -> list[OutputDelta]:
        step, output = self._pipeline.collect()
        started = self._trace.now()
        if isinstance(output, Exception):
            return self._fail_step(step, output)
        deltas = [self._finish(request) for request in self.scheduler.take_in_transfers(step, output)]
        deltas += self._fail_all(output.broken_request_ids, _no_finite_numbers_error)
        deltas += self._fail_all(output.banned_request_ids, no_token_left_error)
        self._outputs.capture(output.captured)
        updates = self.scheduler.update_from_output(step, output)
        self.stats.step_processed(step, output, updates, self._pipeline.compute_seconds)
        self._process(updates, deltas)
        if self._check_integrity and not self.scheduler.requests:
            self.scheduler.kv.check_integrity()
        self._trace.step_processed(started, step, updates)
        return deltas

    def _process(self, updates: list[RequestUpdate], deltas: list[OutputDelta]) -> None:
        """From tokens to text; adds to ``deltas`` what there is to tell."""
        texts, unfinished = self._outputs.texts, self.scheduler.requests
        for update in updates:
            request = update.request
            text = texts[request.request_id]
            if text.push(request, update.new_token_ids, update.logprobs):
                self.scheduler.stop(request)
            if request.request_id not in unfinished:
                deltas.append(self._finish(request))
            elif not request.final_only:
                deltas.append(text.take())

    def _finish(self, request: Request) -> OutputDelta:
        delta = self._outputs.finish(request)
        self._trace.request_finished(request, delta.finish_reason)
        self.stats.request_finished(request, delta)
        try:
            self._hook.ksana_request_finished(
                request_id=request.request_id,
                finish_reason=delta.finish_reason,
                stats=delta.stats,
                trace_context=request.trace_context,
            )
        except Exception:
            logger.exception("a plugin's ksana_request_finished failed")
        return delta

    def _fail_step(self, step: SchedulerOutput, cause: Exception) -> list[OutputDelta]:
        """What the executor's rows hold is unknown now: everything that runs ends, the waiting go on."""
        logger.error("a step of %d requests failed", len(step.num_scheduled_tokens), exc_info=cause)
        self._pipeline.reset()
        self.stats.step_failed()
        error = _computation_error("the computation failed; the server's log says why")
        return [self._finish(request) for request in self.scheduler.fail_running(error)]

    def _fail_all(self, request_ids: list[str], error: Callable[[], RequestError]) -> list[OutputDelta]:
        failed = [self.scheduler.fail(request_id, error()) for request_id in request_ids]
        return [self._finish(request) for request in failed if request is not None]


def _no_finite_numbers_error() -> RequestError:
    return _computation_error("the model computed no finite numbers for this request")


def _computation_error(message: str) -> RequestError:
    return RequestError(
        message, status=500, type="server_error", code="computation_failed", ksana_code=KsanaCode.RUNTIME_FAILED
    )
