"""What goes into a step: budget, chunks, order, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams

MakeBench = Callable[..., Any]


def test_one_request_from_prompt_to_end(make_bench: MakeBench) -> None:
    bench = make_bench()
    request = bench.add(6, max_tokens=3)
    counts = [bench.step().num_scheduled_tokens for _ in range(3)]
    assert counts == [{"r0": 6}, {"r0": 1}, {"r0": 1}]
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.num_output_tokens == 3
    assert bench.step().removed_request_ids == ["r0"]
    bench.assert_empty()


def test_budget_limits_the_tokens_of_a_step(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=10)
    for _ in range(3):
        bench.add(7, max_tokens=5)
    assert bench.step().num_scheduled_tokens == {"r0": 7, "r1": 3}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 4, "r2": 5}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 2}
    bench.run()


def test_running_requests_come_before_waiting_ones(make_bench: MakeBench) -> None:
    """Nobody who is being answered pauses for a newcomer."""
    bench = make_bench(max_num_batched_tokens=4)
    for _ in range(4):
        bench.add(1, max_tokens=6)
    bench.step()
    bench.add(9, max_tokens=1)
    for _ in range(4):
        assert bench.step().num_scheduled_tokens == {f"r{i}": 1 for i in range(4)}
    bench.run()


def test_budget_below_the_number_of_running_requests_starves_nobody(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=2, max_num_seqs=8)
    requests = [bench.add(3, max_tokens=3) for _ in range(5)]
    bench.run()
    assert all(request.num_output_tokens == 3 for request in requests)


@pytest.mark.parametrize(("chunk", "steps"), [(1, 10), (7, 2), (9, 2), (10, 1), (0, 1)])
def test_prompt_is_computed_in_chunks(make_bench: MakeBench, chunk: int, steps: int) -> None:
    bench = make_bench(split_fuse_token_num=chunk)
    request = bench.add(10, max_tokens=2)
    for number in range(1, steps + 1):
        scheduled = bench.step().num_scheduled_tokens["r0"]
        assert scheduled <= (chunk or 10)
        # A chunk in the middle of a prompt must not yield a token.
        assert request.num_output_tokens == (1 if number == steps else 0)
        assert len(bench.updates) == (1 if number == steps else 0)
    bench.run()


def test_chunk_size_is_a_limit_for_each_request_not_for_the_step(make_bench: MakeBench) -> None:
    bench = make_bench(split_fuse_token_num=4, max_num_batched_tokens=10)
    for _ in range(3):
        bench.add(9)
    assert bench.step().num_scheduled_tokens == {"r0": 4, "r1": 4, "r2": 2}
    bench.run()


def while_one_decodes(make_bench: MakeBench, **config: Any) -> Any:
    """A bench with steps of 50 tokens, in which r0 has its prompt behind it."""
    bench = make_bench(max_num_batched_tokens=50, **config)
    bench.add(3, max_tokens=20)
    bench.step()
    return bench


def test_prompts_get_little_of_a_step_that_decodes(make_bench: MakeBench) -> None:
    """A long prompt would stop everybody's text for as long as it takes. The others' tokens take time as well."""
    bench = make_bench(max_num_batched_tokens=50, max_mixed_prefill_tokens=5, long_prefill_token_threshold=0)
    bench.add(3, max_tokens=20)
    assert bench.step().num_scheduled_tokens == {"r0": 3}
    bench.add(6, max_tokens=20)
    bench.add(30, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 4}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 2, "r2": 2}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 3}
    bench.run()


def test_prompts_go_on_however_many_decode(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=50, max_mixed_prefill_tokens=8, long_prefill_token_threshold=0)
    for _ in range(8):
        bench.add(1, max_tokens=20)
    bench.step()
    bench.add(6, max_tokens=2)
    counts = [bench.step().num_scheduled_tokens["r8"] for _ in range(3)]
    assert counts == [2, 2, 2]
    bench.run()


def test_most_of_the_waiting_begin_to_be_answered_before_the_others(make_bench: MakeBench) -> None:
    """In one step all would wait for the sum of the prompts."""
    bench = make_bench(max_num_batched_tokens=70, max_mixed_prefill_tokens=8)
    for _ in range(8):
        bench.add(7, max_tokens=2)
    first = [f"r{number}" for number in range(5)]
    assert bench.step().num_scheduled_tokens == dict.fromkeys(first, 7)
    assert bench.step().num_scheduled_tokens == {**dict.fromkeys(first, 1), "r5": 7, "r6": 7, "r7": 7}
    bench.run()


def test_whoever_came_a_step_before_changes_little_for_the_others(make_bench: MakeBench) -> None:
    """The first of many that come at once may find an idle engine; then few run, and the others are as many as ever."""
    bench = make_bench(max_num_batched_tokens=70, max_mixed_prefill_tokens=8)
    bench.add(7, max_tokens=20)
    bench.step()
    for _ in range(7):
        bench.add(7, max_tokens=20)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 7, "r2": 7, "r3": 7, "r4": 7}
    assert len(bench.step().num_scheduled_tokens) == 8
    bench.run()


def test_short_prompts_go_whole_and_pass_by_a_long_one(make_bench: MakeBench) -> None:
    """Nobody waits for somebody else's long prompt, nor gives it more than its part of the step."""
    bench = while_one_decodes(make_bench, max_mixed_prefill_tokens=8, long_prefill_token_threshold=10)
    bench.add(40, max_tokens=2)
    bench.add(10, max_tokens=2)
    bench.add(9, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 7, "r2": 10, "r3": 9}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 5, "r2": 1, "r3": 1}
    bench.run()


def test_the_rest_of_a_long_prompt_is_a_short_one(make_bench: MakeBench) -> None:
    bench = while_one_decodes(make_bench, max_mixed_prefill_tokens=8, long_prefill_token_threshold=10)
    bench.add(17, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 7}
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 10}
    bench.run()


def test_who_came_after_a_long_prompt_decodes_as_if_it_had_come_before(make_bench: MakeBench) -> None:
    """The long one is the first to be served, when nobody has been seen to decode yet."""
    bench = make_bench(max_num_batched_tokens=50, max_mixed_prefill_tokens=8, long_prefill_token_threshold=10)
    bench.add(200, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 50}
    bench.add(5, max_tokens=20)
    assert bench.step().num_scheduled_tokens == {"r0": 45, "r1": 5}
    for _ in range(5):
        assert bench.step().num_scheduled_tokens == {"r0": 7, "r1": 1}
    bench.run()


def test_a_long_prompt_leaves_half_of_the_step_at_most(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=50, long_prefill_token_threshold=10, max_num_seqs=8)
    bench.add(200, max_tokens=2)
    bench.step()
    for _ in range(4):
        bench.add(9, max_tokens=1)
    assert bench.step().num_scheduled_tokens == {"r0": 25, "r1": 9, "r2": 9, "r3": 7}
    bench.run()


def test_nothing_is_left_to_those_who_cannot_be_admitted(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=50, long_prefill_token_threshold=10, max_num_seqs=1)
    bench.add(200, max_tokens=2)
    bench.step()
    bench.add(9, max_tokens=1)
    assert bench.step().num_scheduled_tokens == {"r0": 50}
    bench.run()


def test_a_small_step_takes_all_who_wait(make_bench: MakeBench) -> None:
    """Two steps for few tokens would cost more than one."""
    bench = make_bench(max_num_batched_tokens=50, max_mixed_prefill_tokens=30)
    for _ in range(4):
        bench.add(7, max_tokens=2)
    assert len(bench.step().num_scheduled_tokens) == 4
    bench.run()


def test_prompts_get_the_whole_step_while_nobody_decodes(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=50, max_mixed_prefill_tokens=4)
    bench.add(60, max_tokens=2)
    bench.add(30, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 50}
    assert bench.step().num_scheduled_tokens == {"r0": 10, "r1": 30}
    bench.run()


def test_limit_beside_decoding_can_be_lifted(make_bench: MakeBench) -> None:
    bench = while_one_decodes(make_bench, max_mixed_prefill_tokens=0)
    bench.add(40, max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 40}
    bench.run()


def test_no_more_requests_run_than_allowed(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(3, max_tokens=2)
    assert list(bench.step().num_scheduled_tokens) == ["r0", "r1"]
    bench.step()
    assert list(bench.step().num_scheduled_tokens) == ["r2"]
    bench.run()


def test_first_come_first_served(make_bench: MakeBench) -> None:
    """Priorities are ignored, and a short request does not overtake a long one that does not fit yet."""
    bench = make_bench(num_blocks=6, max_num_seqs=8)
    bench.add(12, max_tokens=4)
    bench.add(16, max_tokens=1)
    bench.add(1, max_tokens=1, priority=-5)
    assert list(bench.step().num_scheduled_tokens) == ["r0"]
    while bench.scheduler.num_running:
        step = bench.step()
        assert "r2" not in step.num_scheduled_tokens or "r1" in step.num_scheduled_tokens
    bench.run()


def test_priority_order(make_bench: MakeBench) -> None:
    """Lower numbers first, and first come first served among equals."""
    bench = make_bench(max_num_seqs=1, policy="priority")
    for priority in (1, 0, 1, -1, 0):
        bench.add(3, max_tokens=1, priority=priority)
    served = []
    while bench.scheduler.requests:
        served += list(bench.step().num_scheduled_tokens)
    assert served == ["r3", "r1", "r4", "r0", "r2"]


@pytest.mark.parametrize("caching", [True, False])
def test_cached_prefix_is_not_computed_again(make_bench: MakeBench, caching: bool) -> None:
    bench = make_bench(caching=caching)
    prompt = list(range(11))
    bench.add(prompt)
    bench.run()
    request = bench.add(prompt)
    assert bench.step().num_scheduled_tokens == {"r1": 3 if caching else 11}
    assert request.num_cached_tokens == (8 if caching else 0)
    bench.run()
    assert request.num_cached_tokens == (8 if caching else 0)


def test_prefix_lets_a_request_in_that_would_not_fit_without_it(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=7)
    prompt = list(range(16))
    bench.add(prompt, max_tokens=2)
    bench.step()
    bench.add([*prompt, 99], max_tokens=2)
    bench.add([77, *prompt], max_tokens=2)
    assert bench.step().num_scheduled_tokens == {"r0": 1, "r1": 1}
    bench.run()


def test_output_stops_at_a_stop_token(make_bench: MakeBench) -> None:
    probe = make_bench()
    reference = probe.add([1, 2, 3], max_tokens=5)
    probe.run()
    expected = reference.output_token_ids
    third = expected[2]
    assert third not in expected[:2]

    def end_of(**options: Any) -> Request:
        bench = make_bench()
        request: Request = bench.add([1, 2, 3], max_tokens=5, **options)
        bench.run()
        return request

    eos = end_of(eos_token_ids=(third,))
    assert (eos.output_token_ids, eos.status, eos.stop_reason) == (
        expected[:3], RequestStatus.FINISHED_STOPPED, None
    )  # fmt: skip
    stop = end_of(sampling=SamplingParams(stop_token_ids=(third,)))
    assert (stop.output_token_ids, stop.status, stop.stop_reason) == (
        expected[:3], RequestStatus.FINISHED_STOPPED, third
    )  # fmt: skip
    ignored = end_of(eos_token_ids=(third,), sampling=SamplingParams(ignore_eos=True))
    assert ignored.output_token_ids == expected
    both = end_of(eos_token_ids=(third,), sampling=SamplingParams(ignore_eos=True, stop_token_ids=(third,)))
    assert (both.output_token_ids, both.stop_reason) == (expected[:3], third)


def test_several_tokens_of_one_step_end_at_the_stop_token(make_bench: MakeBench) -> None:
    """What an executor has computed past the end is dropped."""
    bench = make_bench()
    request = bench.add([1, 2, 3], max_tokens=9, eos_token_ids=(7,))
    step = bench.scheduler.schedule()
    output = bench.executor.execute(step)
    output.sampled_token_ids["r0"] = [5, 7, 8, 9]
    [update] = bench.scheduler.update_from_output(step, output)
    assert update.new_token_ids == request.output_token_ids == [5, 7]
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_first_scheduled_time_is_kept_over_a_preemption(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=4)
    bench.add(4, max_tokens=9)
    request = bench.add(4, max_tokens=9)
    bench.clock.now = 5.0
    bench.step()
    bench.clock.now = 6.0
    bench.run()
    assert request.num_preemptions > 0
    assert request.first_scheduled_time == 5.0
