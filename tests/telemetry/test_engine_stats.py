"""What the engine counts is what it has done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana import LLM, SamplingParams
from ksana.engine.stats import RECENT_STEPS, TokenIntervals
from ksana.types.request import RequestDraft
from ksana.types.stats import EngineSnapshot, Histogram

TinyPath = Callable[..., Path]
StartLLM = Callable[..., LLM]


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def enable_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_everything_counted_adds_up(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(), split_fuse_token_num=16, max_num_seqs=4)
    prompts = [[*list(range(5, 55)), 60 + i] for i in range(6)]
    lengths = [3, 9, 17, 1, 30, 12]
    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    llm.generate(prompts[:1], sampling[:1])
    llm.generate(prompts[1:], sampling[1:])
    seen = llm.engine.snapshot()
    assert (seen.num_running, seen.num_waiting) == (0, 0)
    assert seen.blocks_used == 0
    assert seen.blocks_cached + seen.blocks_free == llm.engine.num_free_blocks
    assert seen.blocks_cached >= 51 // 16
    assert seen.finished == {"length": 6}
    assert seen.errors == {}
    assert seen.prompt_tokens == 6 * 51
    assert (seen.prefix_queries, seen.prefix_hits, seen.full_prefix_hits) == (6, 5, 5)
    assert seen.cached_tokens == 5 * 48
    assert seen.output_tokens == sum(lengths)
    assert seen.prefill_tokens == seen.prompt_tokens - seen.cached_tokens
    # The last token of an answer is never computed.
    assert seen.decode_tokens >= sum(lengths) - 6
    assert [h.count for h in (seen.time_to_first_token, seen.queue_time, seen.request_latency)] == [6, 6, 6]
    assert seen.inter_token_latency.count == sum(lengths) - 6
    assert (seen.prompt_lengths.sum, seen.output_lengths.sum) == (6 * 51, sum(lengths))
    assert 0 < seen.forward_seconds < seen.request_latency.sum
    assert seen.schedule_seconds > 0


def test_recent_steps_are_the_last_ones_in_order_and_bounded(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    seen = llm.engine.snapshot()
    assert sum(step.num_prefill_tokens for step in seen.recent_steps) == seen.prefill_tokens == 3
    assert sum(step.num_decode_tokens for step in seen.recent_steps) == seen.decode_tokens
    assert len(seen.recent_steps) == seen.num_steps
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=RECENT_STEPS + 20, ignore_eos=True))
    recent = llm.engine.snapshot().recent_steps
    assert len(recent) == RECENT_STEPS
    assert [step.number for step in recent] == sorted({step.number for step in recent})
    assert all(before.time_s <= after.time_s for before, after in itertools.pairwise(recent))
    assert {step.num_requests for step in recent} == {1}


def test_what_is_computed_again_after_a_preemption_is_prefill(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(), num_blocks=11, launch_block_threshold=1, enable_prefix_caching=False)
    prompts = [[10 + i] * 40 for i in range(3)]
    llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    seen = llm.engine.snapshot()
    assert seen.preemptions > 0
    assert (seen.prompt_tokens, seen.prefix_queries) == (120, 3)
    assert seen.prefill_tokens > seen.prompt_tokens
    assert seen.output_tokens == 180
    assert seen.inter_token_latency.count == 177
    assert seen.finished == {"length": 3}


def test_sequences_that_share_a_prompt_count_it_once(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    llm.generate([list(range(5, 45))], SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True))
    seen = llm.engine.snapshot()
    assert (seen.prompt_tokens, seen.prefix_queries, seen.prefix_hits) == (40, 1, 0)
    assert (seen.output_tokens, seen.finished) == (18, {"length": 3})
    assert (seen.time_to_first_token.count, seen.inter_token_latency.count) == (3, 15)


def test_an_aborted_request_is_counted_as_such_and_spoils_no_latency(tiny_path: TinyPath) -> None:
    async def scenario(engine) -> tuple[EngineSnapshot, EngineSnapshot]:  # type: ignore[no-untyped-def]
        draft = RequestDraft(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=400, ignore_eos=True))
        async with await engine.submit(draft) as stream:
            await stream.__anext__()
            during = engine.snapshot()
        await engine.drain(10.0)
        return during, engine.snapshot()

    with LLM(str(tiny_path()), threads=1, num_blocks=200) as llm:
        during, after = asyncio.run(scenario(llm.engine))
    assert (during.num_running, during.blocks_used > 0) == (1, True)
    assert (after.num_running, after.blocks_used) == (0, 0)
    assert after.finished == {"abort": 1}
    assert (after.time_to_first_token.count, after.request_latency.count) == (1, 0)


def test_a_snapshot_does_not_change_behind_its_owner(tiny_path: TinyPath, start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    before = llm.engine.snapshot()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert (before.finished, before.recent_steps, before.time_to_first_token.count) == ({}, [], 0)


def test_a_value_at_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(3.0, times=2)
    assert histogram.counts == [2, 2, 3]
    assert (histogram.count, histogram.sum) == (7, 13.5)


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"))), max_size=30))
def test_intervals_are_those_of_each_request(steps: list[tuple[set[str], set[str]]]) -> None:
    """Against a table of when each request got its last token."""
    intervals = TokenIntervals()
    last: dict[str, float] = {}
    ended: set[str] = set()
    for now, (given_tokens, ending) in enumerate(steps, 1):
        given_tokens = given_tokens - ended
        if not given_tokens:
            continue
        expected = {name: now - last[name] if name in last else None for name in given_tokens}
        last |= dict.fromkeys(given_tokens, float(now))
        ended |= ending & given_tokens
        unfinished = set("abcdef") - ended
        common, others = intervals.advance({name: [0] for name in given_tokens}, unfinished, float(now))
        for name in ending & given_tokens:
            intervals.forget(name)
        assert {name: others.get(name, common) if name in others else common for name in given_tokens} == expected
        assert None not in [expected[name] for name in given_tokens - others.keys()]
