"""When blocks run out: who gives way, and that nobody loses a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ksana.types.request import Request, RequestStatus

MakeBench = Callable[..., Any]


def step_until_preemption(bench: Any) -> Any:
    for _ in range(100):
        step = bench.step()
        if bench.scheduler.num_preemptions:
            return step
    raise AssertionError("nobody was preempted")


def test_last_of_the_running_gives_way_and_keeps_its_tokens(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6)
    first, second = bench.add(7, max_tokens=12), bench.add(7, max_tokens=12)
    step = step_until_preemption(bench)
    assert first.status is RequestStatus.RUNNING
    assert second.status is RequestStatus.PREEMPTED
    assert second.num_output_tokens > 0
    assert second.num_computed_tokens == 0
    assert step.removed_request_ids == ["r1"]
    assert list(step.num_scheduled_tokens) == ["r0"]
    kept = second.output_token_ids
    bench.run()
    assert second.output_token_ids[: len(kept)] == kept
    assert first.num_output_tokens == second.num_output_tokens == 12


def test_lowest_priority_gives_way(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6, policy="priority")
    low, high = bench.add(7, max_tokens=12, priority=1), bench.add(7, max_tokens=12, priority=0)
    step_until_preemption(bench)
    assert low.status is RequestStatus.PREEMPTED
    assert high.status is RequestStatus.RUNNING
    bench.run()


def test_nobody_is_admitted_in_a_step_that_preempts(make_bench: MakeBench) -> None:
    """Neither the victim, which would only be thrown out again, nor a newcomer in its place."""
    bench = make_bench(num_blocks=6, policy="priority")
    bench.add(7, max_tokens=12, priority=0)
    bench.add(7, max_tokens=12, priority=2)
    bench.step()
    bench.add(1, max_tokens=1, priority=1)  # would fit into the blocks that the victim leaves
    assert step_until_preemption(bench).new_requests == []
    assert [new.request_id for new in bench.step().new_requests] == ["r2"]
    bench.run()


def test_admission_leaves_a_block_for_each_running_request(make_bench: MakeBench) -> None:
    """Or the newcomer would be thrown out as soon as one of them needs its next block."""
    bench = make_bench(num_blocks=5)
    bench.add(8, max_tokens=4)
    bench.step()
    bench.add(12, max_tokens=4)
    assert list(bench.step().num_scheduled_tokens) == ["r0"]
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_preempted_request_returns_before_newer_ones(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6)
    bench.add(7, max_tokens=12)
    victim = bench.add(7, max_tokens=12)
    step_until_preemption(bench)
    bench.add(1, max_tokens=1)
    bench.add(1, max_tokens=1)
    admitted = []
    while victim.status is RequestStatus.PREEMPTED:
        admitted += [new.request_id for new in bench.step().new_requests]
    assert admitted[0] == "r1"
    bench.run()


def test_preempted_request_finds_its_own_blocks_again(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=8)
    first = bench.add(7, max_tokens=16)
    victim = bench.add(11, max_tokens=16)
    step_until_preemption(bench)
    bench.scheduler.abort(first.request_id)
    step = bench.step()
    assert victim.status is RequestStatus.RUNNING
    [new] = step.new_requests
    assert new.token_ids == victim.all_token_ids[: len(new.token_ids)]
    assert new.num_computed_tokens >= 8
    assert victim.num_cached_tokens == 0  # what its first admission found
    bench.run()


def test_request_alone_in_the_cache_is_never_preempted(make_bench: MakeBench) -> None:
    for windows in ([None], [5], [None, 3]):
        bench = make_bench(num_blocks=12, windows=windows, split_fuse_token_num=3)
        length = bench.kv.max_request_tokens(64, bench.scheduler.max_chunk)
        request = bench.add(length // 2, max_tokens=length - length // 2)
        bench.run()
        assert request.status is RequestStatus.FINISHED_LENGTH
        assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [[None], [None, 6], [None, 3, 9]])
def test_outputs_are_those_of_an_unlimited_cache(
    make_bench: MakeBench, windows: list[int | None], caching: bool
) -> None:
    def outputs(num_blocks: int) -> tuple[list[list[int]], int]:
        bench = make_bench(num_blocks=num_blocks, windows=windows, caching=caching, split_fuse_token_num=5)
        requests: list[Request] = [bench.add(5 + i, max_tokens=14) for i in range(6)]
        bench.run()
        return [request.output_token_ids for request in requests], bench.scheduler.num_preemptions

    unlimited, none = outputs(1000)
    limited, some = outputs(7)
    assert none == 0
    assert some > 0
    assert limited == unlimited
