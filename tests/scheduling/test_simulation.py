"""Random traffic over tiny caches, against what each request answers alone."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ksana.errors import RequestError
from ksana.types.request import Request, RequestStatus
from ksana.types.step import ModelRunnerOutput

MakeBench = Callable[..., Any]


@dataclass(frozen=True)
class Arrival:
    """Sequences of a prompt, when they come, and after how many steps the first one's client leaves (if ever)."""

    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    leaves_after: int | None
    num_sequences: int


PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.integers(1, 24).map(lambda length: [i % 5 for i in range(length)]),
)
ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=PROMPTS,
    max_tokens=st.integers(1, 16),
    priority=st.integers(0, 2),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    num_sequences=st.sampled_from([1, 1, 1, 2, 4]),
)


def stays(arrival: Arrival) -> Arrival:
    return replace(arrival, leaves_after=None)


def answer_alone(make_bench: MakeBench, prompt: list[int], max_tokens: int, cache: dict[Any, list[int]]) -> list[int]:
    key = (tuple(prompt), max_tokens)
    if key not in cache:
        bench = make_bench(num_blocks=1000)
        request = bench.add(prompt, max_tokens=max_tokens)
        bench.run()
        cache[key] = request.output_token_ids
    return cache[key]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    num_blocks=st.integers(3, 24),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.sampled_from([[None], [5], [None, 4], [2, 7]]),
    num_window_blocks=st.sampled_from([0, 6, 12]),
    caching=st.booleans(),
    chunk=st.sampled_from([0, 1, 3, 7]),
    budget=st.sampled_from([1, 2, 5, 16, 4096]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    drafts=st.sampled_from([0, 1, 3, 6]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_every_request_answers_as_if_it_were_alone(
    make_bench: MakeBench, arrivals: list[Arrival], num_blocks: int, **options: Any
) -> None:
    """No token is lost, doubled or computed on another's context, and the traffic comes to an end."""
    options["split_fuse_token_num"] = options.pop("chunk")
    options["max_num_batched_tokens"] = options.pop("budget")
    bench = make_bench(num_blocks=num_blocks, **options)
    admitted: list[tuple[Arrival, Request]] = []
    streamed: dict[str, list[int]] = {}
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    work = sum((len(a.prompt) + a.max_tokens) * a.num_sequences for a in arrivals)
    for now in range(20 * work + 100):
        while pending and pending[0].step <= now:
            arrival = pending.pop(0)
            request = bench.group(arrival.num_sequences, arrival.prompt, arrival.max_tokens, priority=arrival.priority)
            sequences = request.sequences
            fits = bench.kv.fits_empty(bench.kv.peak_blocks(request.max_total_tokens, bench.scheduler.max_chunk))
            try:
                bench.scheduler.add_request(request)
                assert fits
                admitted += [(arrival if sequence is request else stays(arrival), sequence) for sequence in sequences]
            except RequestError:
                assert not fits
        for arrival, request in admitted:
            if arrival.leaves_after is not None and now == arrival.step + arrival.leaves_after:
                bench.scheduler.abort(request.request_id)
        if not pending and not bench.scheduler.has_work():
            break
        bench.step()
        for update in bench.updates:
            streamed.setdefault(update.request.request_id, []).extend(update.new_token_ids)
    bench.assert_empty()
    answers: dict[Any, list[int]] = {}
    for arrival, request in admitted:
        alone = answer_alone(make_bench, arrival.prompt, arrival.max_tokens, answers)
        assert streamed.get(request.request_id, []) == request.output_token_ids
        if request.status is RequestStatus.FINISHED_ABORTED:
            assert request.output_token_ids == alone[: request.num_output_tokens]
        else:
            assert request.status is RequestStatus.FINISHED_LENGTH
            assert request.output_token_ids == alone


@pytest.mark.parametrize("windows", [[None], [None, 8]])
def test_memory_is_flat_over_ten_thousand_steps(make_bench: MakeBench, windows: list[int | None]) -> None:
    """Lists that are never drained and rows that are never dropped grow with every request."""
    bench = make_bench(num_blocks=12, windows=windows, max_num_seqs=4)
    scheduler = bench.scheduler
    rng = random.Random(0)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            while len(scheduler.requests) < 6:
                bench.add([rng.randrange(2) for _ in range(rng.randrange(1, 20))], max_tokens=rng.randrange(1, 12))
            if rng.random() < 0.02:
                scheduler.abort(rng.choice(list(scheduler.requests)))
            step = scheduler.schedule()
            sampled = {
                request_id: [rng.randrange(50)]
                for request_id, count in step.num_scheduled_tokens.items()
                if scheduler.requests[request_id].num_computed_tokens + count
                == scheduler.requests[request_id].num_tokens
            }
            scheduler.update_from_output(step, ModelRunnerOutput(sampled))

    def traced() -> int:
        for request_id in list(scheduler.requests):
            scheduler.abort(request_id)
        scheduler.schedule()
        scheduler.kv.reset_prefix_cache()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    run(1000)
    tracemalloc.start()
    try:
        run(1000)
        early = traced()
        run(8000)
        late = traced()
    finally:
        tracemalloc.stop()
    assert scheduler.num_preemptions > 0
    assert late - early < 4096
