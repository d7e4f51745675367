"""Waiting: full queues, timeouts, aborts and failures in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ksana.errors import RequestError
from ksana.scheduling.queues import RequestQueue, fcfs_key
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams

MakeBench = Callable[..., Any]


def test_full_queue_refuses_and_serves_again_later(make_bench: MakeBench) -> None:
    bench = make_bench(max_waiting_queue_len=2, max_num_seqs=1)
    bench.add(3)
    bench.add(3)
    with pytest.raises(RequestError, match="the waiting queue is full") as caught:
        bench.add(3)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    bench.step()
    bench.add(3)
    bench.run()


def test_waiting_request_times_out(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=1, waiting_timeout_s=10.0)
    bench.add(3, max_tokens=8)
    waiting = bench.add(3)
    bench.step()
    bench.clock.now = 9.9
    late = bench.add(3)
    assert bench.scheduler.expire_waiting() == []
    bench.clock.now = 10.5
    assert bench.scheduler.expire_waiting() == [waiting]
    assert waiting.status is RequestStatus.FINISHED_ERROR
    assert waiting.error is not None
    assert (waiting.error.status, waiting.error.code) == (503, "timeout")
    bench.run()
    assert late.status is RequestStatus.FINISHED_LENGTH


def test_all_sequences_of_a_prompt_time_out_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=1, waiting_timeout_s=10.0)
    bench.add(3, max_tokens=8)
    bench.step()
    leader = bench.group(3, 5)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    bench.clock.now = 10.5
    assert set(bench.scheduler.expire_waiting()) == set(sequences)
    assert all(sequence.status is RequestStatus.FINISHED_ERROR for sequence in sequences)
    bench.run()


def test_running_and_preempted_requests_do_not_time_out(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=6, waiting_timeout_s=10.0)
    bench.add(7, max_tokens=12)
    victim = bench.add(7, max_tokens=12)
    while victim.num_preemptions == 0:
        bench.step()
    bench.clock.now = 100.0
    assert bench.scheduler.expire_waiting() == []
    bench.run()
    assert victim.status is RequestStatus.FINISHED_LENGTH


def to_waiting(bench: Any) -> Request:
    bench.add(20, max_tokens=4)
    request: Request = bench.add(20, max_tokens=4)
    bench.step()
    assert request.status is RequestStatus.WAITING
    return request


def to_unseen(bench: Any) -> Request:
    request: Request = bench.add(20, max_tokens=4)
    return request


def to_mid_prefill(bench: Any) -> Request:
    request: Request = bench.add(20, max_tokens=4)
    bench.step()
    assert 0 < request.num_computed_tokens < 20
    return request


def to_running(bench: Any) -> Request:
    request: Request = bench.add(5, max_tokens=9)
    while request.num_output_tokens < 2:
        bench.step()
    return request


def to_preempted(bench: Any) -> Request:
    bench.add(7, max_tokens=12)
    request: Request = bench.add(7, max_tokens=12)
    while request.status is not RequestStatus.PREEMPTED:
        bench.step()
    return request


STATES = [to_unseen, to_waiting, to_mid_prefill, to_running, to_preempted]


@pytest.mark.parametrize("reach", STATES)
def test_abort_in_every_state_frees_everything_at_once(make_bench: MakeBench, reach: Callable[[Any], Request]) -> None:
    bench = make_bench(num_blocks=6, split_fuse_token_num=8)
    request = reach(bench)
    others = list(bench.scheduler.requests.keys() - {request.request_id})
    tokens = list(request.all_token_ids)
    assert bench.scheduler.abort(request.request_id) is request
    assert request.status is RequestStatus.FINISHED_ABORTED
    bench.kv.check_integrity()
    for other in others:
        bench.scheduler.abort(other)
    assert bench.kv.num_free_blocks == 6
    assert bench.scheduler.abort(request.request_id) is None, "it has ended already"
    bench.assert_empty()
    assert request.all_token_ids == tokens


@pytest.mark.parametrize("reach", STATES)
def test_others_go_on_after_an_abort(make_bench: MakeBench, reach: Callable[[Any], Request]) -> None:
    bench = make_bench(num_blocks=6, split_fuse_token_num=8)
    request = reach(bench)
    others = [other for other in bench.scheduler.requests.values() if other is not request]
    others.append(bench.add(9))
    bench.scheduler.abort(request.request_id)
    bench.run()
    assert all(other.status is RequestStatus.FINISHED_LENGTH for other in others)


def test_abort_between_schedule_and_update_drops_the_late_token(make_bench: MakeBench) -> None:
    """A stop found in the text of one request ends another's computation never."""
    bench = make_bench()
    gone, stays = bench.add(5), bench.add(5)
    step = bench.scheduler.schedule()
    output = bench.executor.execute(step)
    bench.scheduler.abort(gone.request_id)
    updates = bench.scheduler.update_from_output(step, output)
    assert [update.request for update in updates] == [stays]
    assert gone.num_output_tokens == 0
    bench.run()


def test_unknown_requests_are_no_error(make_bench: MakeBench) -> None:
    bench = make_bench()
    assert bench.scheduler.abort("nobody") is None
    assert bench.scheduler.fail("nobody", RequestError("x")) is None


def test_failed_request_carries_its_error_and_frees_its_blocks(make_bench: MakeBench) -> None:
    bench = make_bench()
    request = to_running(bench)
    error = RequestError("broken", status=500)
    assert bench.scheduler.fail(request.request_id, error) is request
    assert request.status is RequestStatus.FINISHED_ERROR
    assert request.error is error
    bench.assert_empty()


def test_stop_after_the_end_does_nothing(make_bench: MakeBench) -> None:
    """A stop string may be found in the very token that reached the length limit."""
    bench = make_bench()
    request = bench.add(3, max_tokens=1)
    bench.step()
    assert request.status is RequestStatus.FINISHED_LENGTH
    bench.scheduler.stop(request)
    assert request.status is RequestStatus.FINISHED_LENGTH
    bench.assert_empty()


def test_stop_ends_a_running_request(make_bench: MakeBench) -> None:
    bench = make_bench()
    request = to_running(bench)
    bench.scheduler.stop(request)
    assert request.status is RequestStatus.FINISHED_STOPPED
    bench.assert_empty()


def test_queue_does_not_remove_somebody_else() -> None:
    queue = RequestQueue(fcfs_key)
    inside = Request("a", [1], SamplingParams(), max_total_tokens=2)
    stranger = Request("b", [1], SamplingParams(), max_total_tokens=2)
    queue.add(inside)
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(stranger)
    assert list(queue) == [inside]
