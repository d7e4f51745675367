"""The rules of a beam search, and beams on their way through the scheduler: blocks, preemption, aborts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ksana.errors import RequestError
from ksana.scheduling.beam_search import BeamSearch
from ksana.testing.paged_memory import beam_scores, prefix_digests
from ksana.types.kv import cdiv
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams
from ksana.types.step import BeamCandidates

MakeBench = Callable[..., Any]
Scores = Callable[[list[int]], list[float]]

LENGTH_PENALTIES = (-1.0, 0.0, 0.7, 1.0, 2.0)
STOPPING = (True, False, "never")


def reference(
    scores: Scores, prompt: list[int], sampling: SamplingParams, max_tokens: int, stops: frozenset[int]
) -> list[list[int]]:
    """A search over all continuations at each length, written down from transformers' rules without any economy."""
    width, penalty = sampling.num_beams, sampling.length_penalty
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        everything = [
            (total + score, [*tokens, token])
            for total, tokens in running
            for token, score in enumerate(scores([*prompt, *tokens]))
        ]
        everything.sort(key=lambda each: -each[0])
        ends = [tokens[-1] in stops or length == max_tokens for _, tokens in everything]
        new = [(t / length**penalty, tokens) for (t, tokens), end in zip(everything[:width], ends, strict=False) if end]
        finished = sorted([*finished, *new], key=lambda each: -each[0])[:width]
        running = [each for each, end in zip(everything, ends, strict=True) if not end][:width]
        if not running:
            break
        if len(finished) == width:
            hoped = max_tokens if sampling.early_stopping == "never" and penalty > 0 else length
            if sampling.early_stopping is True or running[0][0] / hoped**penalty <= finished[-1][0]:
                break
    return [tokens for _, tokens in finished]


def paged_scores(tokens: list[int]) -> list[float]:
    return beam_scores(prefix_digests(tokens)[-1], 50)


@pytest.mark.parametrize(("penalty", "stopping"), list(itertools.product(LENGTH_PENALTIES, STOPPING)))
def test_the_rules(penalty: float, stopping: Any) -> None:
    """A few candidates a beam are enough to find what a search over the whole vocabulary finds."""
    rng = random.Random(penalty)
    for number in range(12):
        scores = functools.partial(random_scores, number)
        stops = frozenset(rng.sample(range(12), rng.randrange(4)))
        max_tokens = rng.randrange(1, 9)
        sampling = SamplingParams(num_beams=rng.randrange(2, 5), length_penalty=penalty, early_stopping=stopping)
        search = BeamSearch(sampling, max_tokens, stops)
        texts: list[list[int]] = [[]]
        while not search.is_done:
            parents = search.advance([likeliest(scores(text), sampling.num_beams + len(stops)) for text in texts])
            texts = [[*texts[i], beam.token_id] for i, beam in zip(parents, search.beams, strict=True)]
            assert texts == [[step.token_id for step in beam.steps()] for beam in search.beams]
        found = [[step.token_id for step in beam.hypothesis.steps()] for beam in search.finished]
        assert found == reference(scores, [], sampling, max_tokens, stops)


def random_scores(number: int, tokens: list[int]) -> list[float]:
    weights = random.Random(f"{number} {tokens}").choices(range(1, 1000), k=12)
    return [math.log(weight / sum(weights)) for weight in weights]


def likeliest(scores: Sequence[float], count: int) -> BeamCandidates:
    tokens = sorted(range(len(scores)), key=lambda token: -scores[token])[:count]
    return BeamCandidates(tokens, [scores[token] for token in tokens])


def test_a_search_without_a_way_on_is_done() -> None:
    search = BeamSearch(SamplingParams(num_beams=3), 5, frozenset({7}))
    search.advance([BeamCandidates([7, 1], [-0.1, -0.5])])
    assert not search.is_done
    search.advance([BeamCandidates([], [])])
    assert search.is_done
    assert [beam.hypothesis.token_id for beam in search.finished] == [7]


# -- in the scheduler --------------------------------------------------------------------------------------------------


def beams(num_beams: int, n: int = 1, **options: Any) -> SamplingParams:
    return SamplingParams(num_beams=num_beams, n=n, **{"ignore_eos": True, **options})


def expected(request: Request) -> list[list[int]]:
    prompt = request.all_token_ids[: request.num_prompt_tokens]
    limit = request.max_total_tokens - request.num_prompt_tokens
    return reference(paged_scores, prompt, request.sampling, limit, request.stop_token_ids)


@pytest.mark.parametrize("windows", [[None], [5], [None, 4]])
@pytest.mark.parametrize("options", [{}, {"caching": False}, {"block_size": 1}, {"split_fuse_token_num": 3}])
def test_beams_read_what_they_have_written(
    make_bench: MakeBench, windows: list[int | None], options: dict[str, Any]
) -> None:
    bench = make_bench(num_blocks=300, windows=windows, **options)
    groups = [
        bench.group(n, length, max_tokens=12, sampling=beams(width, n, stop_token_ids=stops))
        for width, n, length, stops in ((2, 1, 8, ()), (4, 4, 9, (3, 7)), (5, 2, 1, (1, 2, 3, 4)))
    ]
    for leader in groups:
        bench.scheduler.add_request(leader)
    sequences = [leader.sequences for leader in groups]
    bench.run()
    for leader, own in zip(groups, sequences, strict=True):
        assert [request.output_token_ids for request in own] == expected(leader)[: len(own)]


def test_all_beams_are_in_the_same_steps(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=5)
    other = bench.add(3, max_tokens=30)
    leader = bench.add(9, max_tokens=6, sampling=beams(4))
    alone = bench.add(2, max_tokens=30)
    while leader.request_id in bench.scheduler.requests:
        own = {i: count for i, count in bench.step().num_scheduled_tokens.items() if i.startswith(leader.request_id)}
        assert len(own) in (0, 1, 4)
        if len(own) == 4:
            assert set(own.values()) == {1}
    assert leader.output_token_ids == expected(leader)[0]
    bench.run()
    assert (other.num_output_tokens, alone.num_output_tokens) == (30, 30)


@pytest.mark.parametrize(
    ("windows", "chunk", "num_blocks"), [([None], 0, 34), ([None], 2, 34), ([13], 2, 26), ([None, 4], 2, 30)]
)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("enable_async", [False, True])
def test_searches_give_way_and_come_back_whole(
    make_bench: MakeBench, windows: list[int | None], chunk: int, num_blocks: int, caching: bool, enable_async: bool
) -> None:
    options = {"caching": caching, "enable_async": enable_async, "split_fuse_token_num": chunk}
    bench = make_bench(num_blocks=num_blocks, windows=windows, **options)
    plain = bench.add(9, max_tokens=24)
    leaders = [bench.add(length, max_tokens=24, sampling=beams(width)) for length, width in ((7, 3), (10, 4), (5, 4))]
    in_flight: list[tuple[Any, Any]] = []
    while in_flight or bench.scheduler.has_work():
        step = bench.scheduler.schedule()
        if not step.is_empty:
            in_flight.append((step, bench.executor.execute(step)))
        if len(in_flight) > enable_async or (step.is_empty and in_flight):
            bench.scheduler.update_from_output(*in_flight.pop(0))
        bench.kv.check_integrity()
    bench.assert_empty()
    assert sum(leader.num_preemptions for leader in leaders) > 0
    assert plain.num_output_tokens == 24
    assert [leader.output_token_ids for leader in leaders] == [expected(leader)[0] for leader in leaders]


@pytest.mark.parametrize("length", [1600, 1603])
def test_blocks_are_shared(make_bench: MakeBench, length: int) -> None:
    """And nothing but the last, partly filled one is ever copied."""
    bench = make_bench(num_blocks=500, block_size=16)
    bench.add(length, max_tokens=8, sampling=beams(8))
    used = 0
    while bench.scheduler.has_work():
        step = bench.step()
        used = max(used, bench.kv.num_usable_blocks - bench.kv.num_free_blocks)
        assert len(step.block_copies) < 8
    assert used <= length // 16 + 8 * (cdiv(length + 7, 16) - length // 16)


def test_rows_are_kept_for_all_beams(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=5)
    leader = bench.add(9, max_tokens=6, sampling=beams(4))
    followers = [bench.add(3, max_tokens=3) for _ in range(3)]
    while bench.scheduler.has_work():
        assert len(bench.step().num_scheduled_tokens) <= 5
        assert len(bench.executor.request_ids) <= 5
    assert leader.output_token_ids == expected(leader)[0]
    assert all(request.num_output_tokens == 3 for request in followers)


def test_too_many_beams_are_refused(make_bench: MakeBench) -> None:
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        bench = make_bench(**{limit: 3})
        with pytest.raises(RequestError, match="num_beams is 4, but this server runs 3") as caught:
            bench.add(5, sampling=beams(4))
        assert caught.value.param == "num_beams"
    bench = make_bench(num_blocks=20)
    with pytest.raises(RequestError, match="for each of 4 beams can never fit"):
        bench.add(20, max_tokens=17, sampling=beams(4))
    request = bench.add(20, max_tokens=12, sampling=beams(4))
    bench.run()
    assert request.output_token_ids == expected(request)[0]


@pytest.mark.parametrize("steps", range(9))
def test_leaving_one_result_leaves_the_others(make_bench: MakeBench, steps: int) -> None:
    """Whether the one that stands for the search is left or another, before, during or after the prompt."""
    for left in range(3):
        bench = make_bench(split_fuse_token_num=4)
        leader = bench.group(3, 10, max_tokens=7, sampling=beams(4, 3))
        sequences = leader.sequences
        bench.scheduler.add_request(leader)
        for _ in range(steps):
            bench.step()
        bench.scheduler.abort(sequences[left].request_id)
        bench.run()
        assert sequences[left].status is RequestStatus.FINISHED_ABORTED
        rest = [request for request in sequences if request is not sequences[left]]
        assert [request.output_token_ids for request in rest] == expected(leader)[:2]


def test_leaving_all_results_ends_the_search(make_bench: MakeBench) -> None:
    bench = make_bench()
    leader = bench.group(2, 10, max_tokens=50, sampling=beams(3, 2))
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    for _ in range(4):
        bench.step()
    for request in sequences:
        bench.scheduler.abort(request.request_id)
    bench.assert_empty()


def test_a_broken_beam_fails_its_search(make_bench: MakeBench) -> None:
    bench = make_bench()
    leader = bench.add(5, max_tokens=9, sampling=beams(3))
    for _ in range(3):
        bench.step()
    step = bench.scheduler.schedule()
    output = bench.executor.execute(step)
    [beam, *_] = (request_id for request_id in step.num_scheduled_tokens if request_id != leader.request_id)
    del output.candidates[beam]
    assert bench.scheduler.fail(beam, RequestError("broken")) is leader
    assert bench.scheduler.update_from_output(step, output) == []
    assert leader.status is RequestStatus.FINISHED_ERROR
    bench.assert_empty()


def test_results_that_do_not_exist_fail(make_bench: MakeBench) -> None:
    """As with a grammar of one word: what could follow is banned for every beam."""
    bench = make_bench()
    leader = bench.group(2, 4, max_tokens=9, sampling=beams(2, 2, stop_token_ids=(0,)))
    sequences = leader.sequences
    bench.scheduler.add_request(leader)
    while leader.request_id in bench.scheduler.requests:
        step = bench.scheduler.schedule()
        output = bench.executor.execute(step)
        output.candidates = dict.fromkeys(output.candidates, BeamCandidates([0], [-1.0]))
        updates = bench.scheduler.update_from_output(step, output)
    assert [update.request for update in updates] == sequences
    assert [request.status for request in sequences] == [
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_ERROR,
    ]
    assert sequences[1].error is not None and sequences[1].error.code == "no_token_left"
    bench.assert_empty()


SEARCHES = st.tuples(
    st.integers(0, 4),  # step of arrival
    st.lists(st.integers(0, 1), min_size=1, max_size=14),  # prompt
    st.sampled_from([20, 12, 4, 1]),  # tokens
    st.sampled_from([3, 5, 2, 1]),  # beams
    st.sampled_from([(), (1, 2), tuple(range(20))]),  # stop tokens
    st.one_of(st.none(), st.none(), st.integers(0, 12)),  # steps after which the first client leaves
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(SEARCHES, min_size=3, max_size=6),
    num_blocks=st.sampled_from([12, 20, 26, 34]),
    block_size=st.sampled_from([1, 4]),
    windows=st.sampled_from([[None], [5], [None, 4]]),
    caching=st.booleans(),
    split_fuse_token_num=st.sampled_from([0, 1, 3]),
    max_num_batched_tokens=st.sampled_from([5, 16, 4096]),
    max_num_seqs=st.sampled_from([5, 16]),
    drafts=st.sampled_from([0, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.sampled_from([1, 2]),
)
def test_every_search_finds_what_it_finds_alone(
    make_bench: MakeBench, arrivals: list[Any], depth: int, **options: Any
) -> None:
    """With preemptions, aborts, chunks, and plain requests between them; in lockstep and one step ahead."""
    bench = make_bench(enable_async=depth == 2, **options)
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    admitted: list[tuple[int | None, list[Request], list[int]]] = []
    in_flight: list[tuple[Any, Any]] = []
    for now in range(3000):
        while pending and pending[0][0] <= now:
            start, prompt, max_tokens, width, stops, leaves = pending.pop(0)
            n = (width + 1) // 2
            leader = bench.group(n, prompt, max_tokens, sampling=beams(width, n, stop_token_ids=stops))
            with contextlib.suppress(RequestError):  # it may be too large for the cache
                bench.scheduler.add_request(leader)
            if leader.request_id not in bench.scheduler.requests:
                continue
            admitted.append((None if leaves is None else start + leaves, leader.sequences, prompt))
        for leaves, sequences, _ in admitted:
            if leaves == now:
                bench.scheduler.abort(sequences[0].request_id)
        if not (pending or in_flight or bench.scheduler.has_work()):
            break
        step = bench.scheduler.schedule()
        if not step.is_empty:
            in_flight.append((step, bench.executor.execute(step)))
        if len(in_flight) == depth or (step.is_empty and in_flight):
            bench.scheduler.update_from_output(*in_flight.pop(0))
        bench.kv.check_integrity()
    bench.assert_empty()
    for _, sequences, prompt in admitted:
        first = sequences[0]
        if first.sampling.num_beams == 1:
            continue  # other simulations are about these
        limit = first.max_total_tokens - first.num_prompt_tokens
        found = reference(paged_scores, prompt, first.sampling, limit, first.stop_token_ids)
        finished = [request for request in sequences if request.status is not RequestStatus.FINISHED_ABORTED]
        assert [request.output_token_ids for request in finished] == found[: len(finished)]
        assert all(request.num_tokens > request.num_prompt_tokens for request in finished)
