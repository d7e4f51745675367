"""The replay of traces: its hit rates are those of the trace."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
from replay_trace import Replay, TraceRequest, oracle_hit_rate, read_trace

BLOCK_SIZE = 64


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Each turn's prompt is the one before it and some hundred tokens more; all begin with the same 512."""
    rng, trace, next_id = random.Random(0), [], 1
    lengths, ids = [600] * count, [[0] for _ in range(count)]
    for turn in range(turns):
        for index in range(count):
            lengths[index] += rng.randrange(100, 900)
            while len(ids[index]) * 512 < lengths[index]:
                ids[index].append(next_id)
                next_id += 1
            trace.append(TraceRequest(10.0 * turn + index, lengths[index], 40, tuple(ids[index])))
    return trace


def replay(trace: list[TraceRequest], num_blocks: int, **options: float) -> Replay:
    speed = {"step_ms": 1.0, "tokens_per_second": 1e6, **options}
    limits = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    done = Replay(argparse.Namespace(**speed, **limits), num_blocks)
    done.run(trace, lambda: None)
    return done


def hit_rate(done: Replay, trace: list[TraceRequest]) -> float:
    return done.num_hit_tokens / sum(request.input_length for request in trace)


def test_with_room_and_time_for_all_the_hit_rate_is_the_ideal_one() -> None:
    trace = conversations(5, 6)
    ideal = oracle_hit_rate(trace, BLOCK_SIZE, 10**9)
    done = replay(trace, 10_000)
    assert 0.5 < ideal < 1
    assert hit_rate(done, trace) == ideal
    assert done.observer.num_removed == done.scheduler.num_preemptions == 0
    assert done.now > trace[-1].arrival_s, "requests must not come before their time"


def test_with_too_little_room_the_oracle_loses_as_much_as_the_cache() -> None:
    """One request after the other, so that the two differ in nothing but their making."""
    trace = conversations(5, 6)
    limited = oracle_hit_rate(trace, BLOCK_SIZE, 150)
    done = replay(trace, 150)
    assert 0 < limited < oracle_hit_rate(trace, BLOCK_SIZE, 10**9)
    assert hit_rate(done, trace) == pytest.approx(limited, abs=0.01)
    assert done.observer.num_removed > 0


def test_requests_that_come_faster_than_they_are_served_run_side_by_side() -> None:
    trace = [TraceRequest(0.0, 2000, 400, tuple(range(4 * i, 4 * i + 4))) for i in range(6)]
    done = replay(trace, 100, step_ms=50.0)
    assert done.scheduler.num_preemptions > 0, "three of them fit, and four prompts"
    assert done.now < 6 * 400 * 0.05


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = {"timestamp": 27482, "input_length": 700, "output_length": 9, "hash_ids": [46, 47]}
    path.write_text(json.dumps(first) + '\n{"timestamp": 1}\n')
    lines = read_trace(path)
    assert next(lines) == TraceRequest(27.482, 700, 9, (46, 47))
    with pytest.raises(SystemExit, match=r"trace\.jsonl, line 2: no request of a trace"):
        next(lines)
