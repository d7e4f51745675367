"""What a step has made must go when the step is over, not when Python next looks for cycles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from ksana.engine.llm import LLM
from ksana.types.sampling import SamplingParams


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "cpu"},
        {"backend": "cpu-torch"},
        {"backend": "cpu", "enable_async": True},
        {"backend": "cpu", "host_memory_factor": 1, "num_blocks": 12},
    ],
    ids=["native", "torch", "overlapped", "swapping"],
)
def test_steps_leave_no_cycles(tiny_path: Callable[..., Path], options: dict[str, object]) -> None:
    """A cycle of some small objects between two large arrays keeps the system from getting the arrays' memory back."""
    prompts = [[1 + i, 5, 7, 9] for i in range(6)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1, top_p=0.9, logprobs=2, max_tokens=30, stop=("never",)),
        SamplingParams(temperature=0, max_tokens=8, num_beams=2),
    ]
    with LLM(tiny_path(), **{"num_blocks": 100, **options}) as llm:
        llm.generate(prompts, sampling * 2, progress=False)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            llm.generate(prompts, sampling * 2, progress=False)
            gc.collect()
            found = sorted({f"{type(thing).__module__}.{type(thing).__name__}" for thing in gc.garbage})
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert [name for name in found if name.startswith(("ksana", "torch", "numpy"))] == []
