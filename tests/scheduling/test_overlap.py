"""Steps that are scheduled before the one in flight has told what it sampled."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ksana.errors import RequestError
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams
from ksana.types.step import SchedulerOutput

MakeBench = Callable[..., Any]


class Overlapped:
    """Drives a bench as the engine does: two steps deep, or one. The executor computes as early or late as it can."""

    def __init__(self, bench: Any, seed: int = 0) -> None:
        self.bench = bench
        self.depth = 2 if bench.scheduler.config.enable_async else 1
        self.stop_after: dict[str, int] = {}  # as a stop string does, which the scheduler does not know
        self._rng = random.Random(seed)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._outputs: deque[Any] = deque()

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.bench.scheduler.has_work()

    def schedule(self) -> SchedulerOutput:
        scheduler = self.bench.scheduler
        step = scheduler.schedule()
        for request in scheduler.running():
            assert request.num_computed_tokens + request.num_in_flight < request.max_total_tokens
        if not step.is_empty:
            self._in_flight.append(step)
            if self._rng.random() < 0.5:
                self._compute(len(self._in_flight))
        self.bench.kv.check_integrity()
        return step

    def collect(self) -> None:
        self._compute(1)
        scheduler = self.bench.scheduler
        for update in scheduler.update_from_output(self._in_flight.popleft(), self._outputs.popleft()):
            request = update.request
            if request.num_output_tokens >= self.stop_after.get(request.request_id, 10**9):
                scheduler.stop(request)
        self.bench.kv.check_integrity()

    def step(self) -> None:
        step = self.schedule()
        if len(self._in_flight) == self.depth or (step.is_empty and self._in_flight):
            self.collect()

    def run(self) -> None:
        while self.has_work():
            self.step()
        self.bench.assert_empty()

    def _compute(self, count: int) -> None:
        while len(self._outputs) < count:
            self._outputs.append(self.bench.executor.execute(self._in_flight[len(self._outputs)]))


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and what may end it early: its client, a stop string, a stop token."""

    step: int
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None
    stop_after: int | None
    stop_tokens: frozenset[int]
    is_followed_up: bool


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    max_tokens=st.integers(1, 16),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    stop_after=st.one_of(st.none(), st.integers(1, 10)),
    stop_tokens=st.frozensets(st.integers(0, 49), max_size=6),
    is_followed_up=st.booleans(),
)


def play(bench: Any, arrivals: list[Arrival], seed: int) -> list[tuple[Request, Request | None]]:
    """Let the arrivals come, each with a second turn if it has one; returns the admitted requests."""
    engine = Overlapped(bench, seed)
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    first_turns: list[tuple[Arrival, Request]] = []
    second_turns: dict[str, Request] = {}
    for now in range(20 * sum(len(a.prompt) + a.max_tokens + 20 for a in arrivals) + 100):
        while pending and pending[0].step <= now:
            arrival = pending.pop(0)
            sampling = SamplingParams(stop_token_ids=tuple(arrival.stop_tokens))
            request = bench.request(arrival.prompt, arrival.max_tokens, sampling=sampling)
            if arrival.stop_after:
                engine.stop_after[request.request_id] = arrival.stop_after
            if add(bench, request):
                first_turns.append((arrival, request))
        for arrival, request in first_turns:
            if arrival.leaves_after is not None and now == arrival.step + arrival.leaves_after:
                bench.scheduler.abort(request.request_id)
            if arrival.is_followed_up and request.status.is_finished and request.request_id not in second_turns:
                second = bench.request([*request.all_token_ids, 3], max_tokens=3)
                add(bench, second)
                second_turns[request.request_id] = second
        if not pending and not engine.has_work():
            break
        engine.step()
    bench.assert_empty()
    return [(request, second_turns.get(request.request_id)) for _, request in first_turns]


def add(bench: Any, request: Request) -> bool:
    try:
        bench.scheduler.add_request(request)
    except RequestError:  # larger than the whole cache
        return False
    return True


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    num_blocks=st.integers(3, 24),
    block_size=st.sampled_from([1, 4]),
    windows=st.sampled_from([[None], [5], [None, 4], [2, 7]]),
    num_window_blocks=st.sampled_from([0, 6, 12]),
    caching=st.booleans(),
    chunk=st.sampled_from([0, 1, 3, 7]),
    budget=st.sampled_from([1, 2, 5, 16, 4096]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    drafts=st.sampled_from([0, 1, 3, 6]),
    seed=st.integers(0, 3),
)
def test_overlapped_traffic_answers_as_requests_do_alone(
    make_bench: MakeBench, arrivals: list[Arrival], num_blocks: int, seed: int, **options: Any
) -> None:
    """Blocks that come back too early, placeholders taken for tokens, a cached token too many: all show as tokens."""
    options["split_fuse_token_num"] = options.pop("chunk")
    options["max_num_batched_tokens"] = options.pop("budget")
    bench = make_bench(num_blocks=num_blocks, enable_async=True, **options)
    for request, second in play(bench, arrivals, seed):
        for turn in (request, second):
            if turn is None or turn.num_output_tokens == 0:
                continue
            bench_alone = make_bench(num_blocks=1000)
            alone = bench_alone.request(
                turn.all_token_ids[: turn.num_prompt_tokens],
                turn.max_total_tokens - turn.num_prompt_tokens,
                sampling=turn.sampling,
            )
            bench_alone.scheduler.add_request(alone)
            bench_alone.run()
            count = turn.num_output_tokens
            assert turn.output_token_ids == alone.output_token_ids[:count]
            if turn.status is RequestStatus.FINISHED_LENGTH:
                assert turn.output_token_ids == alone.output_token_ids


@pytest.mark.parametrize("windows", [[None], [None, 4]])
@pytest.mark.parametrize("chunk", [0, 3])
def test_the_same_traffic_in_both_modes(make_bench: MakeBench, windows: list[int | None], chunk: int) -> None:
    """Ends for the same reason, after the same tokens, in a cache that preempts in both."""
    rng = random.Random(1)
    arrivals = [
        Arrival(
            step=rng.randrange(60),
            prompt=[rng.randrange(2) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 30),
            leaves_after=None,
            stop_after=rng.choice([None, None, None, rng.randrange(1, 20)]),
            stop_tokens=frozenset(rng.sample(range(50), 1)),
            is_followed_up=rng.random() < 0.3,
        )
        for _ in range(60)
    ]
    results = []
    for enable_async in (False, True):
        bench = make_bench(num_blocks=14, windows=windows, split_fuse_token_num=chunk, enable_async=enable_async)
        played = play(bench, arrivals, seed=2)
        assert bench.scheduler.num_preemptions > 0
        results.append(
            [
                (turn.all_token_ids, turn.status, turn.stop_reason)
                for pair in played
                for turn in pair
                if turn is not None
            ]
        )
    assert results[0] == results[1]
    assert {status for _, status, _ in results[0]} == {RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOPPED}


def test_a_step_is_scheduled_on_a_token_that_is_not_known_yet(make_bench: MakeBench) -> None:
    bench = make_bench(enable_async=True)
    engine = Overlapped(bench)
    request = bench.add(6, max_tokens=3)
    assert engine.schedule().num_scheduled_tokens == {"r0": 6}
    assert engine.schedule().num_scheduled_tokens == {"r0": 1}
    assert (request.num_output_tokens, request.num_computed_tokens, request.num_in_flight) == (0, 0, 7)
    engine.collect()
    assert (request.num_output_tokens, request.num_computed_tokens, request.num_in_flight) == (1, 6, 1)
    engine.run()


def test_nothing_is_computed_beyond_the_last_token(make_bench: MakeBench) -> None:
    """The length is known ahead: unlike a stop, it costs no token too many."""
    bench = make_bench(enable_async=True)
    engine = Overlapped(bench)
    bench.add(6, max_tokens=2)
    steps = []
    while engine.has_work():
        steps.append(engine.schedule())
        if len(engine._in_flight) == 2 or steps[-1].is_empty:
            engine.collect()
    assert sum(sum(step.num_scheduled_tokens.values()) for step in steps) == 7


def test_a_token_too_many_is_dropped_and_never_cached(make_bench: MakeBench) -> None:
    bench = make_bench(block_size=1, enable_async=True)
    engine = Overlapped(bench)
    request = bench.add(4, max_tokens=9)
    engine.stop_after["r0"] = 2
    engine.run()
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.num_output_tokens == 2
    # Five were committed: the prompt and the first answer. The second, and what came of it, were in flight at the end.
    assert len(bench.kv.cached_hashes(0)) == 5
    assert len(request.block_hashes) == 5


def test_an_abort_in_flight_frees_at_once_and_drops_what_comes(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=4, enable_async=True)
    engine = Overlapped(bench)
    request = bench.add(12, max_tokens=4)
    engine.schedule()
    engine.schedule()
    bench.scheduler.abort("r0")
    assert bench.kv.num_free_blocks == 4
    # The next one takes the very blocks that the steps in flight still write to.
    heir = bench.add(12, max_tokens=4)
    engine.run()
    assert request.num_output_tokens == 0
    assert heir.num_output_tokens == 4


def test_a_request_that_is_preempted_in_flight_keeps_the_token_that_comes(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6, enable_async=True)
    engine = Overlapped(bench)
    bench.add(7, max_tokens=12)
    victim = bench.add(7, max_tokens=12)
    while victim.status is not RequestStatus.PREEMPTED:
        engine.schedule()
        if victim.status is RequestStatus.PREEMPTED:
            break
        if len(engine._in_flight) == 2:
            engine.collect()
    before = victim.num_output_tokens
    assert (victim.num_in_flight, victim.num_computed_tokens) == (0, 0)
    engine.collect()
    assert victim.num_output_tokens == before + 1
    assert (victim.num_in_flight, victim.num_computed_tokens) == (0, 0)
    engine.run()
    assert victim.num_output_tokens == 12


@pytest.mark.parametrize("num_blocks", range(2, 9))
@pytest.mark.parametrize("windows", [[5], [None, 3]])
def test_a_request_alone_in_the_cache_is_never_preempted(
    make_bench: MakeBench, windows: list[int | None], num_blocks: int
) -> None:
    """With a chunk in flight and one behind it, a window holds more blocks; one that counts too few never ends."""
    bench = make_bench(num_blocks=num_blocks, windows=windows, split_fuse_token_num=8, enable_async=True)
    length = bench.kv.max_request_tokens(64, bench.scheduler.max_uncommitted)
    request = bench.add(length - 1, max_tokens=1)
    Overlapped(bench).run()
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert bench.scheduler.num_preemptions == 0
