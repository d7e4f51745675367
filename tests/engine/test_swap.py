"""Requests that give up their blocks for a while answer as in a cache that holds them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.testing.tiny_models import tiny_model
from ksana.types.stats import EngineSnapshot

PROMPTS = [[3 + (7 * i + 31 * n) % 499 for i in range(30 + 3 * n)] for n in range(8)]
SAMPLING = [SamplingParams(temperature=n % 2, seed=n, max_tokens=40, ignore_eos=True) for n in range(8)]


def answers(model: Path, **options: Any) -> tuple[list[list[int]], EngineSnapshot]:
    with LLM(model, enable_prefix_caching=False, check_integrity=True, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        return [output.token_ids for output in outputs], llm.engine.snapshot()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"num_blocks": 16, "launch_block_threshold": 1}),
        ("mistral", {"num_blocks": 10, "swapout_block_threshold": 2.0, "launch_block_threshold": 0.0}),
    ],
)
def test_swapped_out_and_back(kind: str, options: dict[str, Any], tmp_path: Path, enable_async: bool) -> None:
    model = tiny_model(tmp_path, kind)
    unlimited, _ = answers(model, num_blocks=200)
    limited, counts = answers(model, host_memory_factor=8.0, enable_async=enable_async, **options)
    assert limited == unlimited
    assert counts.swaps_out > 0
    assert counts.swaps_in == counts.swaps_out


@pytest.mark.parametrize("options", [{"preempt_mode": "recompute", "host_memory_factor": 8.0}, {}])
def test_without_will_or_room_to_swap_it_is_computed_again(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    unlimited, _ = answers(model, num_blocks=200)
    limited, counts = answers(model, num_blocks=16, launch_block_threshold=1, **options)
    assert limited == unlimited
    assert counts.swaps_out == 0
    assert counts.preemptions > 0
