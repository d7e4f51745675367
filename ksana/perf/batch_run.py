"""One batch, computed again and again from the same state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ksana.engine.pipeline import Executor
from ksana.errors import UsageError
from ksana.perf.config import Batch
from ksana.perf.scheduler import PerfScheduler
from ksana.types.kv import BlockCopy
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import BlockIds, ModelRunnerOutput, NewRequestData, SchedulerOutput

_SEED = 20240607
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Step:
    """A computed step: what came out, and when its parts began, by ``time.perf_counter``."""

    output: ModelRunnerOutput
    started: float
    scheduled: float
    executed: float
    updated: float


class BatchRun:
    """Brings the requests of a batch to their places, then computes the batch as one step as often as it is told.

    Requests with cached tokens run already, as decoding ones do; their cached tokens were computed by the model. Those
    without arrive anew for each step. Nothing is left of a step when the next one begins: the requests are put back,
    and the tokens of the step are computed again, into the same blocks.

    Args:
        batch: fits the scheduler's limits, see :mod:`ksana.perf.limits`.
        scheduler: without requests, its prefix cache off.
        executor: without rows.
        vocab_size: tokens are drawn from 0 to before this, the same in every run.
    """

    def __init__(self, batch: Batch, scheduler: PerfScheduler, executor: Executor, vocab_size: int) -> None:
        self._batch = batch
        self._scheduler = scheduler
        self._executor = executor
        self._members = list(_members(batch, vocab_size))
        self._placed: dict[str, tuple[_Member, Request]] = {}
        self._fill()

    def step(self) -> Step:
        """Compute the batch once.

        Raises:
            UsageError: the model's output is not finite.
        """
        arrived = [self._arrive(member) for member in self._members if member.num_cached == 0]
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        scheduled = time.perf_counter()
        output = self._executor.execute(plan)
        executed = time.perf_counter()
        self._scheduler.update_from_output(plan, output)
        updated = time.perf_counter()
        self._check(plan, output)
        self._put_back(arrived)
        return Step(output, started, scheduled, executed, updated)

    def close(self) -> None:
        """Give the blocks and the rows back."""
        self._put_back([request for _, request in self._placed.values()])

    def _fill(self) -> None:
        """Compute the cached tokens of the longest request; the others begin alike, and get copies of its blocks."""
        members = [member for member in self._members if member.num_cached > 0]
        if not members:
            return
        tables = {member.name: self._place(member) for member in members}
        donor = max(members, key=lambda member: member.num_cached)
        rows = [NewRequestData.of(request, tables[name]) for name, (_, request) in self._placed.items()]
        for row in rows:
            row.num_computed_tokens = 0 if row.request_id == donor.name else row.num_computed_tokens
        chunk = self._scheduler.max_chunk
        for start in range(0, donor.num_cached, chunk):
            count = min(chunk, donor.num_cached - start)
            self._executor.execute(SchedulerOutput({donor.name: count}, new_requests=[] if start else rows))
        copies = [
            copy
            for member in members
            if member is not donor
            for copy in _block_copies(tables[donor.name], tables[member.name])
        ]
        if copies:
            self._executor.execute(SchedulerOutput(block_copies=copies))

    def _place(self, member: _Member) -> BlockIds:
        request = member.request()
        self._placed[member.name] = (member, request)
        return self._scheduler.place(request, member.num_cached)

    def _arrive(self, member: _Member) -> Request:
        request = member.request()
        self._scheduler.add_request(request)
        return request

    def _put_back(self, ended: list[Request]) -> None:
        """Restore the state before the step, except for those that ``ended``, of whom nothing stays."""
        for request in ended:
            self._scheduler.abort(request.request_id)
            self._placed.pop(request.request_id, None)
        rows = []
        for name, (member, request) in self._placed.items():
            self._scheduler.rewind(request, num_computed_tokens=member.num_cached, num_tokens=member.num_tokens)
            rows.append(NewRequestData.of(request, self._scheduler.kv.block_ids(name)))
        removed = self._scheduler.take_removed_ids() + list(self._placed)
        self._executor.execute(SchedulerOutput(new_requests=rows, removed_request_ids=removed))

    def _check(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        planned = {member.name: member.num_forwarding for member in self._members}
        assert plan.num_scheduled_tokens == planned, f"batch {self._batch.label} was not computed as one step"
        if output.broken_request_ids:
            raise UsageError(
                f"batch {self._batch.label}: the model computed no finite numbers; its weights may be damaged, or "
                "--dtype too narrow for them"
            )


@dataclass(frozen=True, slots=True)
class _Member:
    """One request of the batch: its tokens, and how many of them are in the cache before the step."""

    name: str
    token_ids: list[int]
    num_cached: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_forwarding(self) -> int:
        return len(self.token_ids) - self.num_cached

    def request(self) -> Request:
        # The step adds a token; a limit beyond that keeps the request alive, so that it can be put back.
        return Request(self.name, self.token_ids, _GREEDY, max_total_tokens=self.num_tokens + 2)


def _members(batch: Batch, vocab_size: int) -> Iterator[_Member]:
    """Cached tokens are the beginning of one sequence, the others are each request's own."""
    generator = np.random.default_rng(_SEED)
    longest = max(group.kv_cached_token_num for group in batch.requests)
    context = generator.integers(vocab_size, size=longest).tolist()
    names = map(str, range(batch.num_requests))
    for group in batch.requests:
        for _ in range(group.request_num):
            own = generator.integers(vocab_size, size=group.forwarding_token_num).tolist()
            yield _Member(next(names), context[: group.kv_cached_token_num] + own, group.kv_cached_token_num)


def _block_copies(source: BlockIds, destination: BlockIds) -> list[BlockCopy]:
    """Copies of every block of a shorter table."""
    return [
        (group_id, *pair)
        for group_id, (sources, destinations) in enumerate(zip(source, destination, strict=True))
        for pair in zip(sources, destinations, strict=False)
    ]
