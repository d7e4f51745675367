"""One engine step: schedule, compute, sample, text. Synchronous, and owned by one thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from ksana.engine.output_processor import OutputDelta, OutputProcessor
from ksana.errors import KsanaCode, RequestError
from ksana.scheduling import RequestUpdate, Scheduler
from ksana.types.request import Request
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import pluggy

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Who computes a step: a model runner in this process, later several ranks."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


class EngineCore:
    """Scheduler, executor and output processor in lockstep.

    Args:
        hook: for ``ksana_request_finished``.
        check_integrity: verify the block tables whenever the last request has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        outputs: OutputProcessor,
        hook: pluggy.HookRelay,
        *,
        check_integrity: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._outputs = outputs
        self._hook = hook
        self._check_integrity = check_integrity

    def has_work(self) -> bool:
        """True if :meth:`step` would do something."""
        return self.scheduler.has_work()

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if there is no place for it."""
        self._outputs.add(request)
        try:
            self.scheduler.add_request(request)
        except RequestError:
            self._outputs.discard(request)
            raise

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request; returns its last delta, or [] if it had ended already."""
        request = self.scheduler.abort(request_id)
        return [self._finish(request)] if request else []

    def step(self) -> list[OutputDelta]:
        """Move all requests on by one step; returns what is new about them.

        An error in the computation ends the requests that were part of it, and nothing else.
        """
        expired = [self._finish(request) for request in self.scheduler.expire_waiting()]
        step = self.scheduler.schedule()
        try:
            output = self._executor.execute(step)
        except Exception as error:
            return expired + self._fail_step(step, error)
        deltas = expired + self._fail_broken(output.broken_request_ids)
        for update in self.scheduler.update_from_output(step, output):
            deltas.extend(self._process(update))
        if self._check_integrity and not self.scheduler.requests:
            self.scheduler.kv.check_integrity()
        return deltas

    def _process(self, update: RequestUpdate) -> list[OutputDelta]:
        request = update.request
        if self._outputs.push(request, update.new_token_ids, update.logprobs):
            self.scheduler.stop(request)
        if request.status.is_finished:
            return [self._finish(request)]
        return [] if request.final_only else [self._outputs.take(request)]

    def _finish(self, request: Request) -> OutputDelta:
        delta = self._outputs.finish(request)
        try:
            self._hook.ksana_request_finished(
                request_id=request.request_id, finish_reason=delta.finish_reason, stats=delta.stats
            )
        except Exception:
            logger.exception("a plugin's ksana_request_finished failed")
        return delta

    def _fail_step(self, step: SchedulerOutput, cause: Exception) -> list[OutputDelta]:
        """What the executor's rows hold is unknown now: everything that runs ends, the waiting go on."""
        logger.error("a step of %d requests failed", len(step.num_scheduled_tokens), exc_info=cause)
        self._executor.reset()
        running = [r.request_id for r in self.scheduler.running()]
        return self._fail_all(running, "the computation failed; the server's log says why")

    def _fail_broken(self, request_ids: list[str]) -> list[OutputDelta]:
        return self._fail_all(request_ids, "the model computed no finite numbers for this request")

    def _fail_all(self, request_ids: list[str], message: str) -> list[OutputDelta]:
        error = RequestError(
            message, status=500, type="server_error", code="computation_failed", ksana_code=KsanaCode.RUNTIME_FAILED
        )
        failed = [self.scheduler.fail(request_id, error) for request_id in request_ids]
        return [self._finish(request) for request in failed if request is not None]
