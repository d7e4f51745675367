"""Steps on their way through the executor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ksana.engine.compute_thread import ComputeThread
from ksana.engine.trace import NoTrace
from ksana.types.step import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Who computes a step: a model runner in this process, later several ranks.

    Steps are computed in the order in which they come, and a token that a step samples is known to the next one, whose
    ``SchedulerOutput`` may ask for its computation before the scheduler has heard of it.
    """

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


class StepPipeline:
    """Steps between their schedule and their output: at most one that computes and one that waits behind it.

    Args:
        executor: computes.
        thread: where it does so while the caller goes on; None for the caller's own thread, in :meth:`collect`.
        trace: hears of each computation.

    Attributes:
        compute_seconds: that all steps together took to compute.
    """

    def __init__(self, executor: Executor, thread: ComputeThread | None, trace: NoTrace) -> None:
        self._executor = executor
        self._thread = thread
        self._trace = trace
        self.compute_seconds = 0.0
        self._depth = 2 if thread else 1
        self._pending: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
        self._broken = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """True if a step must be collected before the next one is submitted."""
        return len(self._pending) >= self._depth

    def submit(self, step: SchedulerOutput) -> None:
        """Have a step computed after those that are pending."""
        compute = partial(self._compute, step)
        self._pending.append((step, self._thread.submit(compute).result if self._thread else compute))

    def collect(self) -> tuple[SchedulerOutput, ModelRunnerOutput | Exception]:
        """Wait for the oldest pending step. Returns it with its output, or with what it has failed by."""
        step, result = self._pending.popleft()
        try:
            return step, result()
        except Exception as error:
            return step, error

    def reset(self) -> None:
        """After a failed step: drop those behind it, and let the executor forget all requests."""
        while self._pending:
            self.collect()
        if self._thread:
            self._thread.submit(self._executor.reset).result()
        else:
            self._executor.reset()
        self._broken = False

    def close(self) -> None:
        """Let the step that computes end, drop the one behind it, and end the thread."""
        self._broken = True
        if self._thread:
            self._thread.stop()

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._broken:
            # What the rows hold is unknown: this step could write into blocks that others have cached.
            raise RuntimeError("not computed: the engine stops, or a step before this one has failed")
        started, started_s = self._trace.now(), time.monotonic()
        try:
            output = self._executor.execute(step)
        except BaseException:
            self._broken = True
            raise
        self.compute_seconds += time.monotonic() - started_s
        self._trace.step_executed(started, step)
        return output
