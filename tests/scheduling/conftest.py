"""A scheduler with an executor that computes from block contents instead of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ksana.kv import KVCacheManager
from ksana.scheduling import RequestUpdate, Scheduler
from ksana.testing.paged_memory import PagedMemoryExecutor, make_kv_config
from ksana.types.config import SchedulerConfig
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import SchedulerOutput


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A scheduler, the cache it fills, and the executor that checks it.

    Args:
        windows: one KV cache group each; None is full attention.
        config: fields of :class:`SchedulerConfig`.
    """

    def __init__(
        self,
        num_blocks: int = 100,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        caching: bool = True,
        **config: Any,
    ) -> None:
        kv_config = make_kv_config(num_blocks, block_size, windows)
        self.clock = Clock()
        self.kv = KVCacheManager(kv_config, enable_prefix_caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.kv, clock=self.clock)
        self.executor = PagedMemoryExecutor(kv_config)
        self._ids = itertools.count()

    def request(self, tokens: int | Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """A request that is not queued yet; a number of tokens stands for a prompt like no other."""
        name = f"r{next(self._ids)}"
        if isinstance(tokens, int):
            tokens = [1000 + 1000 * int(name[1:]) + i for i in range(tokens)]
        sampling = options.pop("sampling", SamplingParams())
        limit = len(tokens) + max_tokens
        return Request(name, list(tokens), sampling, max_total_tokens=limit, arrival_time=self.clock.now, **options)

    def add(self, tokens: int | Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """Queue a request."""
        request = self.request(tokens, max_tokens, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """One whole engine step; returns what was scheduled."""
        step = self.scheduler.schedule()
        self.updates: list[RequestUpdate] = self.scheduler.update_from_output(step, self.executor.execute(step))
        self.kv.check_integrity()
        assert {request.request_id for request in self.scheduler.running()} <= self.executor.request_ids
        return step

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left, and check that nothing is left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "it does not end"
        self.assert_empty()

    def assert_empty(self) -> None:
        """No request holds anything, here or in the executor."""
        if self.scheduler.has_work():
            self.step()
        assert not self.scheduler.requests
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.kv.num_free_blocks == self.kv.pool.num_usable_blocks
        assert not self.executor.request_ids


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    return Bench
