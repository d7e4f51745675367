"""Drafted tokens on their way through the scheduler: room for them, those accepted, those rejected."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ksana.types.request import RequestStatus
from ksana.types.sampling import SamplingParams
from ksana.types.step import SchedulerOutput

MakeBench = Callable[..., Any]


def steps_of(bench: Any) -> list[SchedulerOutput]:
    steps = []
    while bench.scheduler.has_work():
        steps.append(bench.step())
    bench.assert_empty()
    return steps


@pytest.mark.parametrize("windows", [[None], [6], [None, 5]])
@pytest.mark.parametrize("chunk", [0, 3])
def test_the_answer_is_the_same_in_fewer_steps(make_bench: MakeBench, windows: list[int | None], chunk: int) -> None:
    """Slots of rejected drafts are written again: one that is not shows as another token."""
    plain, drafting = (
        make_bench(num_blocks=200, windows=windows, split_fuse_token_num=chunk, drafts=drafts) for drafts in (0, 4)
    )
    requests = [[bench.add(n, max_tokens=60) for n in (1, 5, 12)] for bench in (plain, drafting)]
    num_steps = len(steps_of(plain)), len(steps_of(drafting))
    assert [r.output_token_ids for r in requests[0]] == [r.output_token_ids for r in requests[1]]
    assert num_steps[1] < 0.8 * num_steps[0]
    assert drafting.guesser.num_right > 20
    assert drafting.guesser.num_wrong > 20


def test_drafts_count_among_the_scheduled_tokens_and_in_the_update(make_bench: MakeBench) -> None:
    bench = make_bench(drafts=3)
    request = bench.add(7, max_tokens=20)
    bench.step()
    assert (request.num_tokens, request.num_computed_tokens) == (8, 7)
    for _ in range(6):
        before = request.num_tokens
        step = bench.step()
        drafts = step.draft_token_ids["r0"]
        [update] = bench.updates
        assert step.num_scheduled_tokens["r0"] == 1 + len(drafts)
        accepted = len(update.new_token_ids) - 1
        assert update.new_token_ids[:-1] == drafts[:accepted]
        assert (request.num_tokens, request.num_in_flight) == (before + accepted + 1, 0)
        assert request.num_computed_tokens == request.num_tokens - 1


def test_only_what_was_accepted_is_findable(make_bench: MakeBench) -> None:
    """A block that a rejected draft has filled must not be found by content that is not there."""
    bench = make_bench(block_size=1, drafts=4)
    request = bench.add(3, max_tokens=40)
    while request.num_tokens < 30:
        bench.step()
        assert len(request.block_hashes) == len(bench.kv.cached_hashes(0)) == request.num_computed_tokens
    again = bench.add([*request.all_token_ids, 1], max_tokens=3)
    bench.run()
    assert again.num_cached_tokens >= 29


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_draft_reaches_beyond_the_longest_answer(make_bench: MakeBench, max_tokens: int) -> None:
    bench = make_bench(drafts=8)
    request = bench.add(5, max_tokens=max_tokens)
    for step in steps_of(bench):
        known = 5 + max_tokens
        assert sum(map(len, step.draft_token_ids.values())) < known
    assert request.num_output_tokens == max_tokens
    assert request.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize("position", range(10))
def test_a_stop_token_among_the_drafts_ends_the_answer(make_bench: MakeBench, position: int) -> None:
    def answer(drafts: int, stop: tuple[int, ...] = ()) -> Any:
        bench = make_bench(drafts=drafts)
        request = bench.add(5, max_tokens=12, sampling=SamplingParams(stop_token_ids=stop))
        for step in steps_of(bench):
            assert set(stop).isdisjoint(itertools.chain(*step.draft_token_ids.values()))
        return request.output_token_ids, request.status, request.stop_reason

    token = answer(0)[0][position]
    expected = answer(0, (token,))
    assert expected[1] is RequestStatus.FINISHED_STOPPED
    assert answer(6, (token,)) == expected


def test_nobody_is_preempted_for_a_draft(make_bench: MakeBench) -> None:
    """In a cache that just holds both answers, and a little more now and then."""
    for num_blocks in range(10, 20):
        bench = make_bench(num_blocks=num_blocks, block_size=4, caching=False, drafts=6)
        requests = [bench.add(8, max_tokens=12) for _ in range(2)]
        steps_of(bench)
        assert bench.scheduler.num_preemptions == 0
        assert [request.num_output_tokens for request in requests] == [12, 12]


def test_drafts_leave_the_others_their_part_of_the_budget(make_bench: MakeBench) -> None:
    bench = make_bench(drafts=8, max_num_batched_tokens=6)
    for _ in range(4):
        bench.add(3, max_tokens=30)
    for step in steps_of(bench):
        assert sum(step.num_scheduled_tokens.values()) <= 6
        if not step.new_requests and len(bench.scheduler.running()) == 4:
            assert len(step.num_scheduled_tokens) == 4


def test_a_prompt_waits_no_longer_for_drafts_than_for_tokens(make_bench: MakeBench) -> None:
    """Drafts of one are no prompt of another: they leave its part of a mixed step alone."""
    bench = make_bench(drafts=4, max_mixed_prefill_tokens=8, long_prefill_token_threshold=0)
    bench.add(3, max_tokens=100)
    bench.step()
    bench.add(40, max_tokens=1)
    counts = [bench.step() for _ in range(5)]
    assert [step.num_scheduled_tokens["r1"] for step in counts] == [7] * 5
    assert all(step.draft_token_ids.keys() == {"r0"} for step in counts)


def test_an_error_in_a_step_with_drafts_leaves_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(drafts=4)
    bench.add(3, max_tokens=100)
    bench.step()
    assert bench.scheduler.schedule().draft_token_ids
    bench.scheduler.abort("r0")
    bench.executor.reset()
    bench.scheduler.schedule()
    bench.assert_empty()


def test_ahead_of_drafts_in_flight_nothing_is_scheduled(make_bench: MakeBench) -> None:
    """Where the request goes on is not known before it is known how many are accepted."""
    bench = make_bench(drafts=4, enable_async=True)
    scheduler, executor = bench.scheduler, bench.executor
    request = bench.add(3, max_tokens=50)
    first, second = scheduler.schedule(), scheduler.schedule()  # its first token has to come before it has drafts
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"r0": 3}, {"r0": 1})
    scheduler.update_from_output(first, executor.execute(first))
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(second, executor.execute(second))
    drafting = scheduler.schedule()
    assert drafting.draft_token_ids["r0"]
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(drafting, executor.execute(drafting))
    assert request.num_computed_tokens == request.num_tokens - 1


def test_a_request_whose_drafts_do_not_pay_is_scheduled_ahead(make_bench: MakeBench) -> None:
    bench = make_bench(drafts=4, enable_async=True)
    request = bench.add(3, max_tokens=50)
    bench.step()
    speculator = bench.scheduler.speculator
    while speculator.may_propose(request, 1):
        speculator.observe(request, 1, 0)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first.num_scheduled_tokens == second.num_scheduled_tokens == {"r0": 1}
