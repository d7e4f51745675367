"""A scheduler with an executor that computes from block contents instead of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ksana.kv import KVCacheManager
from ksana.scheduling import RequestUpdate, Scheduler
from ksana.scheduling.speculation import Speculator
from ksana.testing.paged_memory import PagedMemoryExecutor, make_kv_config, prefix_digests
from ksana.testing.scripted_kv_connector import ScriptedKVConnector, TransferScript
from ksana.types.config import KVTransferConfig, SchedulerConfig, SpeculationConfig
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import ModelRunnerOutput, SchedulerOutput


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guesser:
    """A drafter that knows what the executor will draw, and errs now and then: rarely, or each time.

    Attributes:
        num_right, num_wrong: tokens proposed.
    """

    def __init__(self, vocab_size: int = 50) -> None:
        self._vocab_size = vocab_size
        self._known: set[str] = set()
        self.num_right = 0
        self.num_wrong = 0

    def start(self, request: Request) -> None:
        assert request.num_output_tokens > 0
        assert request.request_id not in self._known
        self._known.add(request.request_id)

    def propose(self, request: Request, limit: int) -> list[int]:
        assert limit > 0
        tokens = list(request.all_token_ids)
        errs_at = (len(tokens) // 5 * 7) % 4  # the same for some steps in succession
        for place in range(limit):
            token = prefix_digests(tokens)[-1] % self._vocab_size
            wrong = place == errs_at
            self.num_right += not wrong
            self.num_wrong += wrong
            tokens.append((token + wrong) % self._vocab_size)
        return tokens[request.num_tokens :]

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        assert request.request_id in self._known
        assert request.all_token_ids[-len(new_token_ids) :] == new_token_ids

    def finish(self, request: Request) -> None:
        self._known.remove(request.request_id)

    def assert_empty(self) -> None:
        assert not self._known


class Bench:
    """A scheduler, the cache it fills, and the executor that checks it.

    Args:
        windows: one KV cache group each; None is full attention.
        num_window_blocks: usable blocks of each window beside full attention; 0: as many as of that.
        drafts: most tokens guessed for a request in a step.
        script: how a KV connector behaves; None for no connector.
        transfer: fields of :class:`KVTransferConfig`.
        seed: of what the script leaves to chance.
        config: fields of :class:`SchedulerConfig`.
    """

    def __init__(
        self,
        num_blocks: int = 100,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        num_window_blocks: int = 0,
        caching: bool = True,
        drafts: int = 0,
        script: TransferScript | None = None,
        transfer: dict[str, Any] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> None:
        kv_config = make_kv_config(num_blocks, block_size, windows, num_window_blocks=num_window_blocks)
        self.clock = Clock()
        self.kv = KVCacheManager(kv_config, enable_prefix_caching=caching)
        self.guesser = Guesser()
        speculation = SpeculationConfig(method="guesser", num_speculative_tokens=drafts or 1, step_overhead=64)
        speculator = Speculator(self.guesser, speculation) if drafts else None
        self.executor = PagedMemoryExecutor(kv_config)
        self.connector: ScriptedKVConnector | None = None
        if script is not None:
            self.connector = ScriptedKVConnector(self.kv, self.executor.memory, script, seed)
        self.scheduler = Scheduler(
            SchedulerConfig(**{"launch_block_threshold": 1, **config}),  # caches are small here, and meant to fill up
            self.kv,
            speculator=speculator,
            connector=self.connector,
            transfer_config=KVTransferConfig(**(transfer or {})),
            clock=self.clock,
        )
        self._ids = itertools.count()

    def request(self, tokens: int | Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """A request that is not queued yet; a number of tokens stands for a prompt like no other."""
        name = f"r{next(self._ids)}"
        if isinstance(tokens, int):
            tokens = [1000 + 1000 * int(name[1:]) + i for i in range(tokens)]
        sampling = options.pop("sampling", SamplingParams())
        limit = len(tokens) + max_tokens
        return Request(name, list(tokens), sampling, max_total_tokens=limit, arrival_time=self.clock.now, **options)

    def group(self, count: int, tokens: int | Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """A request that is not queued yet, and ``count - 1`` others that wait for its prompt."""
        leader = self.request(tokens, max_tokens, **options)
        leader.lead([self.request(leader.all_token_ids, max_tokens, **options) for _ in range(count - 1)])
        return leader

    def add(self, tokens: int | Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """Queue a request."""
        request = self.request(tokens, max_tokens, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """One whole engine step; returns what was scheduled."""
        step = self.scheduler.schedule()
        self.take_in(step, self.execute(step))
        self.assert_executor_knows_the_running()
        return step

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """What the worker does."""
        return (
            self.executor.execute(step)
            if self.connector is None
            else self.connector.worker.execute(step, self.executor)
        )

    def take_in(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """What the engine does with the output of a step."""
        self.failed = self.scheduler.take_in_transfers(step, output)
        self.updates: list[RequestUpdate] = self.scheduler.update_from_output(step, output)
        self.kv.check_integrity()

    def assert_executor_knows_the_running(self) -> None:
        """All but those that have just been forked, which the next step tells of."""
        running = {request.request_id for request in self.scheduler.running()}
        assert running - self.scheduler._forked_ids <= self.executor.request_ids

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
        self.guesser.assert_empty()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        assert not self.executor.request_ids


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    return Bench
