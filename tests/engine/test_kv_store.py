"""Blocks that have left the cache come back from the host's memory or from the disk, and answers stay the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.testing.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """Seven full blocks and a half."""
    return [(7 * index + 31 * number) % 499 + 3 for index in range(120)]


PROMPTS = [prompt(number) for number in range(6)]
OTHERS = [prompt(number) for number in range(6, 40)]
"""More than a cache of 24 blocks holds, even if it keeps one block of each."""


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Without a cache of any kind."""
    with LLM(model, num_blocks=200, enable_prefix_caching=False) as llm:
        return answers(llm)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """One after the other, so that each displaces the one before the last."""
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


def external_tokens(llm: LLM) -> dict[str, int]:
    return llm.engine.snapshot().external_cached_tokens


def start(model: Path, **options: Any) -> LLM:
    return LLM(model, num_blocks=24, swa_block_num_ratio=1.0, check_integrity=True, **options)


def test_an_evicted_prefix_comes_back_from_the_host(model: Path, expected: list[list[int]], enable_async: bool) -> None:
    with start(model, host_memory_factor=40.0, enable_async=enable_async) as llm:
        assert answers(llm) == expected
        answers(llm, OTHERS)
        before = external_tokens(llm).get("host", 0)
        assert answers(llm) == expected
        assert external_tokens(llm) == {"host": before + 6 * 112}


def test_another_process_finds_what_is_on_disk(
    model: Path, expected: list[list[int]], enable_async: bool, tmp_path: Path
) -> None:
    options = {"connectors": ["local_disk"], "disk_path": str(tmp_path / "kv"), "enable_async": enable_async}
    with start(model, **options) as llm:
        assert answers(llm) == expected
    with start(model, **options) as llm:
        assert answers(llm) == expected
        assert external_tokens(llm)["disk"] == 6 * 112


def test_damaged_files_are_computed_again(
    model: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"connectors": ["local_disk"], "disk_path": str(tmp_path / "kv")}
    with start(model, **options) as llm:
        assert answers(llm) == expected
    for number, path in enumerate(sorted((tmp_path / "kv").iterdir())):
        if number % 3 == 0:
            content = bytearray(path.read_bytes())
            content[-5] ^= 0x40
            path.write_bytes(content)
    with start(model, **options) as llm, caplog.at_level(logging.WARNING, "ksana.connectors"):
        assert answers(llm) == expected
        assert len([record for record in caplog.records if "checksum" in record.getMessage()]) == 1
        assert answers(llm) == expected, "what was computed again is stored again"


def test_memory_comes_before_the_disk(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    options = {"connectors": ["local_disk"], "disk_path": str(tmp_path / "kv"), "host_memory_factor": 40.0}
    with start(model, **options) as llm:
        assert answers(llm) == expected
    with start(model, **options) as llm:
        assert answers(llm) == expected
        from_disk = external_tokens(llm)["disk"]
        assert from_disk == 6 * 112
        answers(llm, OTHERS)
        assert answers(llm) == expected
        assert external_tokens(llm) == {"disk": from_disk, "host": 6 * 112}, "it came to the host on its way"


@pytest.mark.parametrize("host_memory_factor", [8.0, 0.6])
def test_many_at_once_are_answered_as_alone(
    model: Path, expected: list[list[int]], host_memory_factor: float, enable_async: bool
) -> None:
    """With swaps, loads and evictions at the same time; with little memory many of them fail."""
    with start(model, host_memory_factor=host_memory_factor, enable_async=enable_async) as llm:
        for _ in range(3):
            outputs = llm.generate([*PROMPTS, *PROMPTS], GREEDY)
            assert [output.token_ids for output in outputs] == [*expected, *expected]


def test_what_two_prompts_begin_with_comes_back_though_the_window_has_left_it(model: Path, enable_async: bool) -> None:
    """The first prompt is computed in one chunk, at whose end a window holds nothing of the common beginning."""
    first, second = PROMPTS[0], [*PROMPTS[0][:70], *PROMPTS[1][:50]]
    with LLM(model, num_blocks=200, enable_prefix_caching=False) as llm:
        [expected] = answers(llm, [second])
    with start(model, host_memory_factor=40.0, enable_async=enable_async) as llm:
        answers(llm, [first])
        answers(llm, OTHERS)
        assert answers(llm, [second]) == [expected]
        assert external_tokens(llm) == {"host": 64}
