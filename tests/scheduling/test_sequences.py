"""Several sequences of one prompt: it is computed once, and its blocks are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ksana.types.kv import cdiv
from ksana.types.request import RequestStatus
from ksana.types.sampling import SamplingParams

MakeBench = Callable[..., Any]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [40, 41, 43])
def test_the_prompt_is_computed_once(make_bench: MakeBench, caching: bool, length: int) -> None:
    bench = make_bench(caching=caching, num_blocks=100)
    leader = bench.group(4, length)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    assert bench.scheduler.num_waiting == 4
    first, second = bench.step(), bench.step()
    assert first.num_scheduled_tokens == {leader.request_id: length}
    assert second.num_scheduled_tokens == {sequence.request_id: 1 for sequence in sequences}
    bench.run()
    assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 1


@pytest.mark.parametrize("length", [1600, 1603])
def test_eight_sequences_take_a_tenth_more_blocks_than_one(make_bench: MakeBench, length: int) -> None:
    bench = make_bench(num_blocks=500, block_size=16)
    bench.scheduler.add_request(bench.group(8, length, max_tokens=8))
    used = 0
    while bench.scheduler.has_work():
        bench.step()
        used = max(used, bench.kv.num_usable_blocks - bench.kv.num_free_blocks)
    prompt_blocks = cdiv(length, 16)
    output_blocks = 8 * (cdiv(length + 7, 16) - prompt_blocks)
    assert used - output_blocks <= 1.1 * prompt_blocks


def test_chunked_prompts_are_shared_when_they_are_complete(make_bench: MakeBench) -> None:
    bench = make_bench(split_fuse_token_num=7)
    leader = bench.group(3, 20)
    bench.scheduler.add_request(leader)
    assert [len(bench.step().num_scheduled_tokens) for _ in range(4)] == [1, 1, 1, 3]
    bench.run()


def test_a_first_token_that_ends_its_sequence_leaves_the_blocks_to_the_others(make_bench: MakeBench) -> None:
    """The end frees the leader's blocks, which nobody may lose by it."""
    bench = make_bench(caching=False)
    leader = bench.group(3, 9, max_tokens=1)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    bench.step()
    assert leader.status is RequestStatus.FINISHED_LENGTH
    second = bench.step()
    assert list(second.num_scheduled_tokens.values()) == [1, 1]
    bench.assert_empty()
    assert all(sequence.output_token_ids == leader.output_token_ids for sequence in sequences)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_abort_before_the_prompt_is_computed_makes_the_next_one_lead(make_bench: MakeBench, steps: int) -> None:
    bench = make_bench(split_fuse_token_num=4)
    leader = bench.group(3, 10)
    _, second, third = leader.sequences
    bench.scheduler.add_request(leader)
    for _ in range(steps):
        bench.step()
    bench.scheduler.abort(leader.request_id)
    assert (second.status, third.status) == (RequestStatus.WAITING, RequestStatus.WAITING_FOR_PROMPT)
    bench.scheduler.abort(third.request_id)
    assert bench.scheduler.num_waiting == 1
    bench.run()
    assert second.num_output_tokens == 4


def test_sequences_without_room_wait_like_others(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=2)
    leader = bench.group(5, 9)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)
    bench.run()
    assert all(sequence.output_token_ids == leader.output_token_ids for sequence in sequences)


def test_a_preempted_leader_still_gives_its_prompt(make_bench: MakeBench) -> None:
    """The prompt is computed again, by then with output behind it, which is no affair of the others."""
    bench = make_bench(num_blocks=7, split_fuse_token_num=4, caching=False)
    older = bench.add(8, max_tokens=12)
    leader = bench.group(2, 9, max_tokens=6)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    bench.run()
    assert all(sequence.num_output_tokens == 6 for sequence in sequences)
    assert older.num_output_tokens == 12
    assert bench.scheduler.num_preemptions > 0


def test_all_sequences_count_in_the_queue(make_bench: MakeBench) -> None:
    bench = make_bench(max_waiting_queue_len=4)
    bench.scheduler.add_request(bench.group(3, 5, sampling=SamplingParams(n=3)))
    with pytest.raises(Exception, match="queue is full"):
        bench.scheduler.add_request(bench.group(2, 5))
    bench.run()


def test_hashes_of_the_prompt_are_computed_once(make_bench: MakeBench) -> None:
    """A long prompt's would cost every sequence some milliseconds more."""
    bench = make_bench()
    leader = bench.group(3, 11)
    _, *followers = leader.sequences
    bench.scheduler.add_request(leader)
    bench.step()
    assert len(leader.block_hashes) == 2
    assert all(follower.block_hashes == leader.block_hashes for follower in followers)
    assert all(follower.block_hashes is not leader.block_hashes for follower in followers)
    bench.run()


def test_a_leader_that_comes_back_with_a_token_more_shares_no_window(make_bench: MakeBench) -> None:
    """Preempted with its prompt in flight, it computes the first token too, and its window has moved on by then."""
    bench = make_bench(num_blocks=9, windows=[None, 8], caching=False, enable_async=True, launch_block_threshold=0.0)
    bench.add(7, max_tokens=4)
    bench.add(13, max_tokens=3)
    bench.step()
    leader = bench.group(2, 11, max_tokens=4)
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert first.num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 11}
    assert leader.status is RequestStatus.PREEMPTED
    for step in (first, second):
        bench.take_in(step, bench.execute(step))
    assert (leader.num_output_tokens, leader.followers) == (1, sequences[1:])
    bench.run()
    assert [sequence.num_output_tokens for sequence in sequences] == [4, 4]
