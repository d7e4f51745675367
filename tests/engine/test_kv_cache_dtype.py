"""Keys and values in eight bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ksana import LLM, SamplingParams
from ksana.errors import UsageError
from ksana.kernels.cpu.library import load_library

PROMPTS = (Path(__file__).parent / "data/prompts.txt").read_text().splitlines()[:24]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

native = pytest.mark.skipif(load_library() is None, reason="Ksana was installed without a C++ compiler")


def greedy(kv_cache_dtype: str) -> list[list[int]]:
    with LLM("demo", dtype="bfloat16", num_blocks=300, backend="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def agreement(actual: list[list[int]], expected: list[list[int]]) -> float:
    """Share of the tokens before the first that differs: behind it the texts are different ones anyhow."""
    equal = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, e, strict=True)))
        for a, e in zip(actual, expected, strict=True)
    ]
    return sum(equal) / sum(map(len, expected))


@native
def test_greedy_text_mostly_agrees_with_that_of_the_models_own_cache() -> None:
    """A scale or an exponent that is wrong would leave nothing of it."""
    own = greedy("auto")
    assert agreement(greedy("fp8_e4m3"), own) > 0.6
    assert agreement(greedy("fp8_e5m2"), own) > 0.4


@native
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_logprobs_stay_close(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], name: str) -> None:
    prompt, wanted = list(range(3, 90)), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    exact, eight_bits = (
        start_llm(tiny_path(), kv_cache_dtype=dtype).generate(prompt, wanted)[0].logprobs for dtype in ("auto", name)
    )
    assert exact is not None
    assert eight_bits is not None
    first, second = (torch.tensor([value for _, value in entry[0].top]) for entry in (exact, eight_bits))
    assert 0 < (first - second).abs().max() < 0.3


def test_a_backend_without_such_a_cache_is_named(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UsageError, match=r"--kv-cache-dtype fp8_e5m2: kernel backend 'cpu-torch' has no such cache"):
        start_llm(tiny_path(), backend="cpu-torch", kv_cache_dtype="fp8_e5m2")


@native
def test_a_model_that_the_native_kernels_leave_to_torch_has_no_such_cache(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    with pytest.raises(UsageError, match="kernel backend 'cpu' has no such cache for a float16 model"):
        start_llm(tiny_path(), dtype="float16", backend="cpu", kv_cache_dtype="fp8_e4m3")
