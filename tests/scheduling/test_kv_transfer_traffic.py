"""Random traffic with a KV connector that is slow and unreliable, against what each request answers alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ksana.errors import RequestError
from ksana.testing.scripted_kv_connector import TransferScript
from ksana.types.request import Request, RequestStatus
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

MakeBench = Callable[..., Any]

STEP_S = 0.1


@dataclass(frozen=True)
class Arrival:
    """Sequences of a prompt, when they come, and after how many steps the first one's client leaves (if ever)."""

    step: int
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None
    num_sequences: int


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 60),
    prompt=st.tuples(st.integers(1, 24), st.integers(2, 4)).map(lambda shape: [i % shape[1] for i in range(shape[0])]),
    max_tokens=st.integers(1, 16),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    num_sequences=st.sampled_from([1, 1, 1, 2]),
)
RARELY = st.sampled_from([0.0, 0.0, 0.1, 0.5])
SCRIPTS = st.builds(
    TransferScript,
    undecided=st.sampled_from([0.0, 0.5, 1.0]),
    sync=st.sampled_from([0.0, 0.5, 1.0]),
    max_delay=st.sampled_from([0, 2, 30]),
    lost_block=RARELY,
    never_received=RARELY,
    never_sent=RARELY,
    swap_room=st.sampled_from([0, 1, 100]),
    saves=st.booleans(),
)


class Engine:
    """Steps a bench as the engine does: two steps deep, or one."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._depth = 2 if bench.scheduler.config.enable_async else 1
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def has_work(self) -> bool:
        return bool(self._in_flight) or self._bench.scheduler.has_work()

    def step(self) -> None:
        bench = self._bench
        bench.clock.now += STEP_S
        bench.scheduler.expire_waiting()
        step = bench.scheduler.schedule()
        if not step.is_empty:
            self._in_flight.append((step, bench.execute(step)))
        bench.kv.check_integrity()
        if len(self._in_flight) == self._depth or (step.only_transfers and self._in_flight):
            bench.take_in(*self._in_flight.popleft())


def stored_by_another_engine(make_bench: MakeBench, arrivals: list[Arrival], bench: Any) -> dict[Any, Any]:
    """What the store holds once an engine with the same kind of cache has served every second arrival."""
    windows = [group.sliding_window for group in bench.kv.config.groups]
    other = make_bench(num_blocks=1000, block_size=bench.kv.block_size, windows=windows, script=TransferScript())
    for arrival in arrivals[::2]:
        other.add(arrival.prompt, max_tokens=arrival.max_tokens)
    other.run()
    stored: dict[Any, Any] = other.connector.stored
    return stored


def add(bench: Any, arrival: Arrival) -> list[Request]:
    request = bench.group(arrival.num_sequences, arrival.prompt, arrival.max_tokens)
    try:
        bench.scheduler.add_request(request)
    except RequestError:  # larger than the whole cache
        return []
    return [request, *request.followers]


def assert_nothing_is_left(bench: Any, requests: list[Request]) -> None:
    bench.assert_empty()
    bench.connector.assert_empty()
    assert bench.connector.finished == {request.request_id for request in requests}
    bench.kv.reset_prefix_cache()
    bench.kv.check_integrity()
    assert bench.kv.usage == 0.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    script=SCRIPTS,
    policy=st.sampled_from(["recompute", "recompute", "fail"]),
    num_blocks=st.integers(3, 24),
    block_size=st.sampled_from([1, 4]),
    windows=st.sampled_from([[None], [None], [None, 5], [6]]),
    num_window_blocks=st.sampled_from([0, 6, 12]),
    caching=st.sampled_from([True, True, False]),
    chunk=st.sampled_from([0, 1, 3, 7]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    drafts=st.sampled_from([0, 0, 3]),
    enable_async=st.booleans(),
    thresholds=st.sampled_from([(0.0, 0.0, 0.0), (1.0, 2.0, 1.0), (3.0, 1.0, 0.0)]),
    seed=st.integers(0, 5),
)
def test_requests_answer_as_if_nothing_had_been_transferred(
    make_bench: MakeBench,
    arrivals: list[Arrival],
    policy: str,
    thresholds: tuple[float, float, float],
    **options: Any,
) -> None:
    """Blocks read or written too late, KV that never came taken for real, tokens of damaged context: all show here."""
    options["split_fuse_token_num"] = options.pop("chunk")
    out, back, launch = thresholds
    bench = make_bench(
        transfer={"load_timeout_s": 1.0, "free_timeout_s": 20.0, "load_failure_policy": policy},
        swapout_block_threshold=out,
        swapin_block_threshold=back,
        launch_block_threshold=launch,
        waiting_timeout_s=1e6,
        **options,
    )
    bench.connector.stored.update(stored_by_another_engine(make_bench, arrivals, bench))
    engine = Engine(bench)
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    requests: list[tuple[Arrival, Request]] = []
    work = sum((len(a.prompt) + a.max_tokens) * a.num_sequences for a in arrivals)
    for now in range(100 * work + 2000):
        while pending and pending[0].step <= now:
            arrival = pending.pop(0)
            requests += [(arrival, request) for request in add(bench, arrival)]
        for arrival, request in requests:
            if arrival.leaves_after is not None and now == arrival.step + arrival.leaves_after:
                bench.scheduler.abort(request.request_id)
        if not pending and not engine.has_work():
            break
        engine.step()
    assert_nothing_is_left(bench, [request for _, request in requests])
    for _, request in requests:
        alone = answer_alone(make_bench, request)
        assert request.output_token_ids == alone[: request.num_output_tokens]
        if request.status is RequestStatus.FINISHED_ERROR:
            assert policy == "fail"
            assert request.error is not None
            assert request.error.code == "kv_load_failed"
        elif request.status is not RequestStatus.FINISHED_ABORTED:
            assert request.output_token_ids == alone


def answer_alone(make_bench: MakeBench, request: Request) -> list[int]:
    bench = make_bench(num_blocks=1000)
    prompt = request.all_token_ids[: request.num_prompt_tokens]
    alone: Request = bench.add(prompt, max_tokens=request.max_total_tokens - request.num_prompt_tokens)
    bench.run()
    return alone.output_token_ids


@pytest.mark.parametrize("enable_async", [False, True])
@pytest.mark.parametrize("windows", [[None], [None, 6], [6]])
def test_swapped_requests_answer_as_in_an_unlimited_cache(
    make_bench: MakeBench, windows: list[int | None], enable_async: bool
) -> None:
    def outputs(num_blocks: int, script: TransferScript | None) -> tuple[list[list[int]], Any]:
        bench = make_bench(
            num_blocks=num_blocks, windows=windows, script=script, enable_async=enable_async, caching=False
        )
        requests: list[Request] = [bench.add(5 + i, max_tokens=14) for i in range(6)]
        engine = Engine(bench)
        while engine.has_work():
            engine.step()
        return [request.output_token_ids for request in requests], bench.scheduler

    unlimited, _ = outputs(1000, None)
    limited, scheduler = outputs(9, TransferScript(swap_room=100, max_delay=2, saves=False))
    assert limited == unlimited
    assert scheduler.transfers.swaps_out > 0
    assert scheduler.transfers.swaps_in == scheduler.transfers.swaps_out
