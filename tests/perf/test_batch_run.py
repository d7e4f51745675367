"""Rounds of a batch: what is computed, what is not, and that nothing is left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana import LLM, SamplingParams
from ksana.engine.assembly import assemble
from ksana.engine.keywords import configure
from ksana.engine.pipeline import Executor
from ksana.errors import UsageError
from ksana.perf.batch_run import BatchRun
from ksana.perf.config import Batch, BatchConfig, RequestGroup
from ksana.perf.limits import check_capacity
from ksana.perf.scheduler import PerfScheduler, RewindableCache
from ksana.testing.paged_memory import PagedMemoryExecutor, make_kv_config
from ksana.types.config import SchedulerConfig
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 50
Shape = tuple[int, int, int]


def make_batch(*groups: Shape) -> Batch:
    """(forwarding, cached, requests) each."""
    return Batch(
        requests=[
            RequestGroup(forwarding_token_num=forwarding, kv_cached_token_num=cached, request_num=count)
            for forwarding, cached, count in groups
        ]
    )


class Recorder:
    """Remembers the steps on their way to an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        return self._executor.execute(step)

    def reset(self) -> None:
        self._executor.reset()

    def tokens(self) -> dict[str, list[int]]:
        """Of each request that has come along, by its id."""
        return {new.request_id: new.token_ids for step in self.steps for new in step.new_requests}

    def num_computed(self) -> int:
        """Tokens computed in all steps together."""
        return sum(sum(step.num_scheduled_tokens.values()) for step in self.steps)


class Bench:
    """The parts beneath a run; the executor fails on any slot that does not hold what a request needs."""

    def __init__(
        self, *, num_blocks: int = 400, block_size: int = 4, windows: Sequence[int | None] = (None,), **config: Any
    ) -> None:
        kv_config = make_kv_config(num_blocks, block_size, windows)
        self.kv = RewindableCache(kv_config, enable_prefix_caching=False)
        self.scheduler = PerfScheduler(SchedulerConfig(**config), self.kv)
        self.memory = PagedMemoryExecutor(kv_config, VOCAB_SIZE)
        self.executor = Recorder(self.memory)

    def run(self, batch: Batch) -> BatchRun:
        return BatchRun(batch, self.scheduler, self.executor, VOCAB_SIZE)

    def check_empty(self) -> None:
        assert self.memory.request_ids == set()
        assert self.scheduler.requests == {}
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        self.kv.check_integrity()


groups = st.lists(
    st.tuples(st.integers(1, 12), st.one_of(st.just(0), st.integers(1, 40)), st.integers(1, 4)), min_size=1, max_size=3
)


@given(
    shapes=groups,
    block_size=st.integers(1, 8),
    windows=st.sampled_from([(None,), (8,), (None, 8), (None, 4, 16)]),
    budget=st.integers(1, 64),
)
def test_every_round_computes_the_batch_over_the_right_cache(
    shapes: list[Shape], block_size: int, windows: tuple[int | None, ...], budget: int
) -> None:
    batch = make_batch(*shapes)
    budget = max(budget, batch.num_forwarding_tokens)  # small ones fill the cache in many chunks
    bench = Bench(num_blocks=2000, block_size=block_size, windows=windows, max_num_batched_tokens=budget)
    run = bench.run(batch)
    sampled = []
    for _ in range(3):
        bench.executor.steps.clear()
        sampled.append(run.step().output.sampled_token_ids)
        assert bench.executor.num_computed() == batch.num_forwarding_tokens
    assert sampled[0] == sampled[1] == sampled[2]
    assert len(sampled[0]) == batch.num_requests
    run.close()
    bench.executor.execute(SchedulerOutput(removed_request_ids=bench.scheduler.take_removed_ids()))
    bench.check_empty()


@given(shapes=groups, block_size=st.integers(1, 8), windows=st.sampled_from([(None,), (None, 8)]), blocks=st.data())
def test_a_batch_that_passes_the_check_fits(
    shapes: list[Shape], block_size: int, windows: tuple[int | None, ...], blocks: st.DataObject
) -> None:
    batch = make_batch(*shapes)
    bench = Bench(num_blocks=blocks.draw(st.integers(2, 300)), block_size=block_size, windows=windows)
    try:
        check_capacity(BatchConfig(batches=[batch]), Path("b.json"), bench.kv, 100)
    except UsageError:
        return
    run = bench.run(batch)
    run.step()
    run.step()
    run.close()
    bench.check_empty()


def test_the_context_is_computed_once_and_not_in_the_rounds() -> None:
    bench = Bench(max_num_batched_tokens=16)
    run = bench.run(make_batch((1, 40, 5), (2, 37, 2)))
    assert bench.executor.num_computed() == 40
    run.close()


def test_batches_follow_each_other_in_one_cache() -> None:
    bench = Bench(num_blocks=60, block_size=4)
    for batch in (make_batch((1, 50, 3)), make_batch((60, 0, 1), (1, 9, 1)), make_batch((1, 50, 3))):
        run = bench.run(batch)
        run.step()
        run.close()
        bench.check_empty()


def test_numbers_that_are_not_finite_are_reported() -> None:
    class Broken(PagedMemoryExecutor):
        def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
            output = super().execute(step)
            return ModelRunnerOutput(broken_request_ids=list(output.sampled_token_ids))

    bench = Bench()
    run = BatchRun(make_batch((3, 0, 1)), bench.scheduler, Broken(bench.kv.config), VOCAB_SIZE)
    with pytest.raises(UsageError, match="batch 1x3: the model computed no finite numbers"):
        run.step()


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_step_samples_what_the_engine_generates(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], architecture: str
) -> None:
    """Wrong or absent keys and values of the cached tokens would lead to other tokens."""
    path = tiny_path(architecture)
    config, plugins = configure("test", path, {"threads": 1, "num_blocks": 200, "max_num_batched_tokens": 64})
    parts = assemble(config, plugins)
    kv = RewindableCache(parts.core.scheduler.kv.config, enable_prefix_caching=False)
    executor = Recorder(parts.runner)
    batch = make_batch((1, 75, 3), (1, 20, 2), (9, 33, 1), (30, 0, 1))
    run = BatchRun(batch, PerfScheduler(config.scheduler, kv), executor, parts.context.model_config.vocab_size)
    sampled = [run.step().output.sampled_token_ids for _ in range(2)]
    llm = start_llm(path, enable_prefix_caching=False)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    expected = {name: llm.generate(tokens, greedy)[0].token_ids for name, tokens in executor.tokens().items()}
    assert sampled == [expected, expected]
