"""What overlaps, and what must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ksana.engine.compute_thread import ComputeThread
from ksana.engine.pipeline import StepPipeline
from ksana.engine.trace import NoTrace
from ksana.types.step import ModelRunnerOutput, SchedulerOutput


class Recorder:
    """An executor that notes on which thread it does what, and fails or waits when told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.num_resets = 0
        self.failing = -1
        self.go_on = threading.Event()
        self.go_on.set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step.number)
        self.threads.add(threading.current_thread().name)
        assert self.go_on.wait(20)
        if step.number == self.failing:
            raise RuntimeError("boom")
        return ModelRunnerOutput()

    def reset(self) -> None:
        self.num_resets += 1
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def pipeline(enable_async: bool) -> Iterator[StepPipeline]:
    pipeline = StepPipeline(Recorder(), ComputeThread() if enable_async else None, NoTrace())
    yield pipeline
    pipeline.close()


def executor_of(pipeline: StepPipeline) -> Recorder:
    executor = pipeline._executor
    assert isinstance(executor, Recorder)
    return executor


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput({"r0": 1}, number=number)


def test_outputs_come_in_order_from_one_thread(pipeline: StepPipeline, enable_async: bool) -> None:
    collected = []
    for number in range(20):
        pipeline.submit(step(number))
        if pipeline.is_full:
            collected.append(pipeline.collect()[0].number)
    while len(pipeline):
        collected.append(pipeline.collect()[0].number)
    assert collected == executor_of(pipeline).steps == list(range(20))
    assert executor_of(pipeline).threads == {"ksana-compute" if enable_async else threading.current_thread().name}


def test_the_caller_goes_on_while_a_step_computes() -> None:
    executor = Recorder()
    executor.go_on.clear()
    pipeline = StepPipeline(executor, ComputeThread(), NoTrace())
    pipeline.submit(step(0))
    assert not pipeline.is_full
    pipeline.submit(step(1))
    assert pipeline.is_full
    executor.go_on.set()
    assert [pipeline.collect()[0].number for _ in range(2)] == [0, 1]
    pipeline.close()


def test_steps_behind_a_failed_one_are_not_computed(pipeline: StepPipeline, enable_async: bool) -> None:
    """They were made for rows that nobody knows any more: what they write could end up in cached blocks."""
    executor = executor_of(pipeline)
    executor.failing = 0
    for number in range(2 if enable_async else 1):
        pipeline.submit(step(number))
    failed, error = pipeline.collect()
    assert failed.number == 0 and isinstance(error, RuntimeError) and str(error) == "boom"
    pipeline.reset()
    assert (len(pipeline), executor.steps, executor.num_resets) == (0, [0], 1)
    pipeline.submit(step(2))
    assert pipeline.collect() == (step(2), ModelRunnerOutput())
    assert len(executor.threads) == 1
