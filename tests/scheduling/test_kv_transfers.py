"""Loads, saves and swaps: what the scheduler does with a KV connector, case by case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ksana.errors import RequestError
from ksana.testing.paged_memory import prefix_digests
from ksana.testing.scripted_kv_connector import TransferScript
from ksana.types.request import Request, RequestStatus

MakeBench = Callable[..., Any]

NEVER = 1.0


def warmed(make_bench: MakeBench, prompt: list[int], script: TransferScript, **options: Any) -> Any:
    """A bench with an empty cache, whose store has the blocks of the prompt."""
    other = make_bench(script=TransferScript())
    other.add(prompt, max_tokens=1)
    other.run()
    bench = make_bench(script=script, **options)
    bench.connector.stored.update(other.connector.stored)
    return bench


def answer(make_bench: MakeBench, prompt: list[int], max_tokens: int = 4) -> list[int]:
    bench = make_bench()
    request: Request = bench.add(prompt, max_tokens=max_tokens)
    bench.run()
    return request.output_token_ids


PROMPT = list(range(18))


def test_an_asynchronous_load_holds_blocks_that_nobody_finds_before_they_have_come(make_bench: MakeBench) -> None:
    bench = warmed(make_bench, PROMPT, TransferScript(max_delay=0, saves=False))
    bench.connector.worker._script.never_received = NEVER
    request = bench.add(PROMPT)
    assert not bench.step().num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert bench.kv.num_free_blocks == bench.kv.num_usable_blocks - 4
    assert bench.scheduler.num_running == 0
    assert bench.scheduler.num_waiting == 1
    assert bench.kv.cached_hashes(0) == set()
    bench.connector.worker._transfers[0].due = 0.0
    bench.step()
    assert len(bench.kv.cached_hashes(0)) == 4
    assert bench.step().num_scheduled_tokens == {"r0": 2}
    assert (request.num_cached_tokens, request.num_external_tokens, request.external_tier) == (16, 16, "host")
    bench.run()
    assert request.output_token_ids == answer(make_bench, PROMPT)


def test_a_synchronous_load_is_computed_on_in_the_same_step(make_bench: MakeBench) -> None:
    bench = warmed(make_bench, PROMPT, TransferScript(sync=1.0))
    request = bench.add(PROMPT)
    step = bench.step()
    assert step.num_scheduled_tokens == {"r0": 2}
    assert step.new_requests[0].num_computed_tokens == 16
    assert (request.num_computed_tokens, request.num_external_tokens) == (18, 16)
    bench.run()
    assert request.output_token_ids == answer(make_bench, PROMPT)


@pytest.mark.parametrize(("sync", "num_loads"), [(0.0, 1), (1.0, 2)])
def test_what_did_not_come_is_computed_and_no_token_is_drawn_from_it(
    make_bench: MakeBench, sync: float, num_loads: int
) -> None:
    """The blocks before it are kept. A step that waited for it is worth nothing; it is tried once more, and no more."""
    script = TransferScript(sync=sync, saves=False)
    bench = warmed(make_bench, PROMPT, script)
    request = bench.add(PROMPT)
    bench.kv.find_prefix(request)
    script.lost_keys = {(0, block_hash) for block_hash in request.block_hashes[2:3]}
    cached = {len(bench.kv.cached_hashes(0))}
    while request.num_output_tokens == 0:
        bench.step()
        cached.add(len(bench.kv.cached_hashes(0)))
    assert cached == {0, 2, 4}
    assert bench.scheduler.transfers.load_failures == num_loads
    assert request.num_external_tokens == 8
    bench.run()
    assert request.output_token_ids == answer(make_bench, PROMPT)


def test_failures_do_not_flood_the_log(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """A broken store fails for every request, and there may be hundreds in a second."""
    script = TransferScript(max_delay=0, saves=False)
    bench = warmed(make_bench, PROMPT, script)
    for wait_s, num_warnings in ((0, 1), (0, 1), (11, 2)):
        bench.clock.now += wait_s
        request = bench.add(PROMPT, max_tokens=1)
        bench.kv.find_prefix(request)
        script.lost_keys = {(0, block_hash) for block_hash in request.block_hashes}
        bench.run()
        bench.kv.reset_prefix_cache()
        assert caplog.text.count("could not be loaded") == num_warnings
    assert bench.scheduler.transfers.load_failures == 3


@pytest.mark.parametrize("sync", [0.0, 1.0])
def test_with_the_policy_fail_the_request_ends(make_bench: MakeBench, sync: float) -> None:
    script = TransferScript(sync=sync, lost_block=1.0)
    bench = warmed(make_bench, PROMPT, script, transfer={"load_failure_policy": "fail"})
    request = bench.add(PROMPT)
    bench.step()
    assert bench.failed == [request]
    assert request.error.status == 500
    bench.assert_empty()


def test_whoever_is_undecided_is_passed_over_and_asked_first_in_the_next_step(make_bench: MakeBench) -> None:
    bench = make_bench(script=TransferScript(), max_num_batched_tokens=8)
    answers: dict[str, int | None] = {"r0": None}
    bench.connector.get_num_new_matched_tokens = lambda request, computed: (answers.get(request.request_id, 0), True)
    for _ in range(3):
        bench.add(8)
    assert list(bench.step().num_scheduled_tokens) == ["r1"]
    answers["r0"] = 0
    assert "r0" in bench.step().num_scheduled_tokens
    bench.run()


def test_who_never_gets_an_answer_is_computed_after_a_while(make_bench: MakeBench) -> None:
    bench = make_bench(script=TransferScript(undecided=1.0), transfer={"load_timeout_s": 5.0})
    request = bench.add(8)
    bench.step()
    assert request.status is RequestStatus.WAITING
    bench.clock.now += 5.0
    assert bench.step().num_scheduled_tokens == {"r0": 8}
    bench.run()


def test_requests_that_are_loading_take_no_place_in_the_batch(make_bench: MakeBench) -> None:
    """vllm#53130."""
    bench = warmed(make_bench, PROMPT, TransferScript(never_received=NEVER), max_num_seqs=1)
    bench.add(PROMPT)
    other = bench.add([7] * 6)
    bench.step()
    assert bench.step().num_scheduled_tokens == {"r1": 1}
    assert other.status is RequestStatus.RUNNING


def test_loads_leave_blocks_for_what_the_loading_will_compute(make_bench: MakeBench) -> None:
    """vllm#45388: if all loads that fit begin, none of their requests may have room to go on."""
    bench = warmed(make_bench, PROMPT, TransferScript(saves=False), num_blocks=10)
    long = [*PROMPT[:16], *range(100, 112)]  # 4 blocks come, 4 are computed
    requests = [bench.add([*long, i], max_tokens=1) for i in range(3)]
    bench.step()
    assert [r.status for r in requests].count(RequestStatus.WAITING_FOR_REMOTE_KV) <= 1
    bench.run()
    assert all(r.status is RequestStatus.FINISHED_LENGTH for r in requests)


def test_loads_leave_no_more_of_a_window_than_they_will_take(make_bench: MakeBench) -> None:
    """A window never holds all of a long prompt, so others need not wait for blocks that nobody will want."""
    options = {"windows": [8], "num_blocks": 10, "split_fuse_token_num": 4}
    bench = warmed(make_bench, PROMPT, TransferScript(never_received=NEVER), **options)
    loading = bench.add([*PROMPT[:16], *range(100, 200)], max_tokens=1)
    other = bench.add(4)
    bench.step()
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert other.status is RequestStatus.RUNNING


def test_the_last_running_request_is_swapped_out_and_comes_back_as_it_was(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6, caching=False, script=TransferScript(swap_room=9, saves=False))
    first, second = bench.add(7, max_tokens=12), bench.add(7, max_tokens=12)
    while second.status is not RequestStatus.SWAPPED:
        step = bench.step()
    assert first.status is RequestStatus.RUNNING
    assert step.removed_request_ids == ["r1"]
    kept = second.num_tokens - 1
    computed = 0
    while second.status is not RequestStatus.RUNNING:
        step = bench.step()
        computed += step.num_scheduled_tokens.get("r1", 0)
    assert step.new_requests[-1].num_computed_tokens == kept
    assert computed == 1
    bench.run()
    assert (bench.scheduler.transfers.swaps_out, bench.scheduler.transfers.swaps_in) == (1, 1)
    assert bench.scheduler.num_preemptions == 0
    assert second.num_output_tokens == 12


def test_nobody_is_computed_again_while_blocks_are_on_their_way_out(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=7, caching=False, script=TransferScript(swap_room=9, never_sent=NEVER, saves=False))
    for _ in range(3):
        bench.add(7, max_tokens=12)
    for _ in range(20):
        bench.step()
    transfers = bench.scheduler.transfers
    assert transfers.swaps_out >= 1
    assert transfers.is_swapping_out
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("options", [{"preempt_mode": "recompute"}, {"script": TransferScript(swap_room=0)}])
def test_without_room_or_will_to_swap_it_is_computed_again(make_bench: MakeBench, options: dict[str, Any]) -> None:
    options = {"script": TransferScript(swap_room=9), **options}
    bench = make_bench(num_blocks=6, **options)
    for _ in range(2):
        bench.add(7, max_tokens=12)
    bench.run()
    assert bench.scheduler.transfers.swaps_out == 0
    assert bench.scheduler.num_preemptions > 0


def test_a_swap_that_does_not_end_is_given_up(make_bench: MakeBench) -> None:
    script = TransferScript(swap_room=9, never_sent=NEVER, saves=False)
    bench = make_bench(num_blocks=6, caching=False, script=script, transfer={"free_timeout_s": 5.0})
    requests = [bench.add(7, max_tokens=12) for _ in range(2)]
    while not bench.scheduler.transfers.is_swapping_out:
        bench.step()
    script.never_sent = 0.0
    bench.clock.now += 5.0
    bench.scheduler.expire_waiting()
    assert requests[1].status is RequestStatus.PREEMPTED
    bench.run()
    assert all(request.num_output_tokens == 12 for request in requests)


def test_whose_swap_was_given_up_is_not_swapped_out_again(make_bench: MakeBench) -> None:
    """A late report of the first would be taken for one of the second, whose blocks are still being read."""
    script = TransferScript(swap_room=9, never_sent=NEVER, saves=False)
    bench = make_bench(num_blocks=9, script=script, transfer={"free_timeout_s": 5.0})
    for _ in range(2):
        bench.add(7, max_tokens=20)
    while not bench.scheduler.transfers.is_swapping_out:
        bench.step()
    script.never_sent = 0.0
    bench.clock.now += 5.0
    bench.scheduler.expire_waiting()
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.transfers.swaps_out == 1


def test_who_gave_back_what_was_loaded_counts_what_it_begins_with(make_bench: MakeBench) -> None:
    """Else more would have been loaded than was cached, and a counter would run backwards."""
    bench = warmed(make_bench, PROMPT, TransferScript(saves=False), num_blocks=7, launch_block_threshold=0.0)
    bench.add(7, max_tokens=8)
    bench.step()
    request = bench.add(PROMPT)
    bench.step()
    assert (request.num_external_tokens, request.status) == (16, RequestStatus.WAITING)
    bench.connector.stored.clear()
    bench.run()
    assert (request.num_cached_tokens, request.num_external_tokens) == (12, 0)


def test_a_window_that_cannot_hold_both_ends_does_not_keep_a_request_waiting(make_bench: MakeBench) -> None:
    """Until its load is confirmed it holds the window of what is cached, and the one of what comes."""
    prompt = list(range(41))
    options = {"windows": [16], "num_blocks": 6, "split_fuse_token_num": 1}
    bench = warmed(make_bench, prompt, TransferScript(saves=False), **options)
    stored, bench.connector.stored = dict(bench.connector.stored), {}
    bench.add(prompt[:17], max_tokens=1)
    bench.run()
    bench.connector.stored.update(stored)
    request = bench.add(prompt, max_tokens=1)
    bench.run()
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_loads_of_a_failed_step_are_forgotten(make_bench: MakeBench) -> None:
    """One that was preempted meanwhile is computed from its first token, and not from behind what never came."""
    bench = warmed(
        make_bench,
        PROMPT,
        TransferScript(sync=1.0, saves=False),
        num_blocks=7,
        enable_async=True,
        launch_block_threshold=0.0,
        preempt_mode="recompute",
    )
    older = bench.add(7, max_tokens=12)
    bench.step()
    request = bench.add(PROMPT)
    assert bench.scheduler.schedule().num_scheduled_tokens == {"r0": 1, "r1": 2}
    assert bench.scheduler.schedule().removed_request_ids == ["r1"]
    bench.executor.reset()
    assert bench.scheduler.fail_running(RequestError("the step failed")) == [older]
    bench.connector.stored.clear()
    bench.run()
    assert request.output_token_ids == answer(make_bench, PROMPT)


def test_a_load_may_write_where_shared_blocks_are_copied_from(make_bench: MakeBench) -> None:
    """Both followers take a copy of their prompt's last block, which is free then, and filled with what is loaded."""
    options = {"num_blocks": 10, "launch_block_threshold": 0.0, "swapout_block_threshold": 0.0}
    bench = warmed(make_bench, PROMPT[:5], TransferScript(sync=1.0, saves=False), **options)
    groups = [bench.group(2, 8, max_tokens=1) for _ in range(2)]
    for leader in groups:
        bench.scheduler.add_request(leader)
    bench.step()
    bench.add(16, max_tokens=1)
    bench.add(PROMPT[:5], max_tokens=1)
    step = bench.step()
    sources = {source for _, source, _ in step.block_copies}
    assert sources & set(step.new_requests[-1].block_ids[0])
    bench.run()


def test_whose_loads_have_failed_is_not_swapped_out(make_bench: MakeBench) -> None:
    """Nothing of it would be loaded again: it would be copied for nothing."""
    script = TransferScript(swap_room=9, undecided=1.0, saves=False)
    bench = make_bench(num_blocks=6, caching=False, script=script, transfer={"load_timeout_s": 1.0})
    requests = [bench.add(7, max_tokens=12) for _ in range(2)]
    bench.step()
    bench.clock.now += 1.0
    bench.run()
    assert all(request.num_output_tokens == 12 for request in requests)
    assert bench.scheduler.transfers.swaps_out == 0
    assert bench.scheduler.num_preemptions > 0


def test_blocks_that_are_kept_no_longer_are_saved_by_nobody(make_bench: MakeBench) -> None:
    """A store that is too slow would keep what others write there, under the name of what was there before."""
    script = TransferScript(never_sent=NEVER)
    bench = make_bench(num_blocks=4, script=script, transfer={"free_timeout_s": 5.0})
    request = bench.add(9, max_tokens=1)
    bench.step()
    bench.step()
    slow = list(bench.connector.worker._transfers)
    assert (len(slow), bench.kv.num_free_blocks) == (1, 1)
    bench.clock.now += 5.0
    bench.scheduler.expire_waiting()
    assert bench.kv.num_free_blocks == 4
    script.saves = False
    bench.add(13, max_tokens=2)
    while bench.scheduler.requests:
        bench.step()
    slow[0].due = 0.0
    bench.step()
    digests = prefix_digests(request.all_token_ids)
    blocks = {(0, block_hash): digests[4 * i : 4 * i + 4] for i, block_hash in enumerate(request.block_hashes)}
    assert all(blocks[key] == content for key, content in bench.connector.stored.items())


def test_a_prompt_that_waits_for_blocks_leaves_its_tokens_to_others(make_bench: MakeBench) -> None:
    bench = make_bench(
        num_blocks=3,
        block_size=16,
        caching=False,
        script=TransferScript(swap_room=9, never_sent=NEVER, saves=False),
        policy="priority",
        split_fuse_token_num=4,
        max_num_batched_tokens=6,
        launch_block_threshold=0.0,
        swapout_block_threshold=0.0,
    )
    victim = bench.add(1, max_tokens=15, priority=2)
    bench.step()
    bench.add(24, max_tokens=1, priority=0)
    bench.add(16, max_tokens=1, priority=1)
    while victim.status is RequestStatus.RUNNING:
        step = bench.step()
    assert step.num_scheduled_tokens == {"r2": 4}
