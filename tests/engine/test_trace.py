"""The trace of an engine's work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams, UsageError
from ksana.engine.assembly import assemble
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.types.config import KsanaConfig, ModelOptions, TelemetryConfig

PROMPTS = [[3 + (7 * i + j) % 400 for j in range(5 + i)] for i in range(8)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def events(tiny_path: Callable[..., Path], tmp_path: Path, enable_async: bool) -> list[dict[str, Any]]:
    """Of eight requests in a cache that is too small for them together, and one that is refused."""
    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"num_blocks": 24, "block_size": 4, "max_model_len": 80, "threads": 1}
    options["launch_block_threshold"] = 1  # so that blocks run out
    with LLM(tiny_path(), trace=str(path), enable_async=enable_async, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        while llm.engine._loop.core.has_work():  # a last step drops the rows of those that have ended
            time.sleep(0.001)
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_every_request_begins_and_ends_and_its_phases_nest(events: list[dict[str, Any]]) -> None:
    stacks: dict[str, list[str]] = {}
    histories: dict[str, list[str]] = {}
    times: dict[str, float] = {}
    for event in events:
        if event["ph"] not in "be":
            continue
        request_id = event["id"]
        assert event["ts"] >= times.get(request_id, 0.0)
        times[request_id] = event["ts"]
        if event["ph"] == "b":
            stacks.setdefault(request_id, []).append(event["name"])
            histories.setdefault(request_id, []).append(event["name"])
        else:
            assert stacks[request_id].pop() == event["name"]
    assert len(histories) == 8
    assert not any(stacks.values())
    for request_id, names in histories.items():
        assert names[:4] == [request_id, "queued", "prefill", "decode"]
        # After a preemption, the same once more.
        assert set(names[4::3]) <= {"preempted"}
        assert set(names[5::3]) <= {"prefill"}
        assert set(names[6::3]) <= {"decode"}
    assert any("preempted" in names for names in histories.values())
    ends = [event["args"] for event in of_phase(events, "e") if event["name"] == event["id"]]
    assert [(end["finish_reason"], end["output_tokens"]) for end in ends] == [("length", 40)] * 8


def test_steps_are_told_once_by_each_part_and_do_not_overlap(events: list[dict[str, Any]], enable_async: bool) -> None:
    tracks: dict[int, list[dict[str, Any]]] = {}
    for event in of_phase(events, "X"):
        tracks.setdefault(event["tid"], []).append(event)
    for slices in tracks.values():
        slices.sort(key=lambda event: event["ts"])
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002  # rounded to a nanosecond
    steps = {name: {e["args"]["step"]: e for e in of_phase(events, "X") if e["name"] == name} for name in NAMES}
    assert steps["schedule"].keys() == steps["execute"].keys() == steps["process"].keys()
    for number, execute in steps["execute"].items():
        schedule = steps["schedule"][number]
        assert schedule["ts"] + schedule["dur"] <= execute["ts"] + 0.002
        assert schedule["args"]["tokens"] == execute["args"]["tokens"]
        assert execute["ts"] + execute["dur"] <= steps["process"][number]["ts"] + 0.002
    scheduled_ahead = any(
        number + 1 in steps["schedule"] and steps["schedule"][number + 1]["ts"] < process["ts"]
        for number, process in steps["process"].items()
    )
    assert scheduled_ahead == enable_async


NAMES = ("schedule", "execute", "process")


def test_sizes_of_steps_and_counters_add_up(events: list[dict[str, Any]]) -> None:
    sizes = [event["args"] for event in of_phase(events, "X") if event["name"] == "schedule"]
    assert all(size["prefill_tokens"] + size["decode_tokens"] == size["tokens"] for size in sizes)
    first = next(size for size in sizes if size["tokens"])
    assert first["prefill_tokens"] == first["tokens"] == sum(map(len, PROMPTS[: first["requests"]]))
    assert any(size["prefill_tokens"] == 0 and size["decode_tokens"] == size["requests"] for size in sizes)
    blocks = [event["args"]["blocks"] for event in of_phase(events, "C") if event["name"] == "blocks in use"]
    assert max(blocks) <= 24 and blocks[-1] == 0
    requests = [event["args"] for event in of_phase(events, "C") if event["name"] == "requests"]
    assert max(counts["running"] for counts in requests) > 1
    assert requests[-1] == {"running": 0, "waiting": 0}


def test_no_prompt_and_no_answer_appears(tiny_path: Callable[..., Path], tmp_path: Path, enable_async: bool) -> None:
    path = tmp_path / "trace.json"
    with LLM(tiny_path(), trace=str(path), num_blocks=50, threads=1, enable_async=enable_async) as llm:
        [output] = llm.generate(["Attack at dawn"], SAMPLING)
    content = path.read_text()
    assert "dawn" not in content and output.text not in content
    assert "token_ids" not in content


def test_a_file_that_cannot_be_written_is_found_before_a_model_is_loaded() -> None:
    config = KsanaConfig(model=ModelOptions(model="/no/such/model"), telemetry=TelemetryConfig(trace="/no/such/file"))
    with pytest.raises(UsageError, match="--trace /no/such/file"):
        assemble(config, create_plugin_manager(PluginSpecs(autoload=False)))
