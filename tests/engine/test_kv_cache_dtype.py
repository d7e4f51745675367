"""Keys and values in eight bits."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ksana import LLM, SamplingParams
from ksana.errors import UsageError
from ksana.kernels.cpu.library import load_library
from ksana.models.kv_scales import load_kv_scales
from ksana.types.config import CacheConfig

DATA = Path(__file__).parent / "data"
PROMPTS = (DATA / "prompts.txt").read_text().splitlines()[:24]
TEXT = Path(__file__).parents[2] / "benchmarks/data/opticks.txt"
SCALES = DATA / "demo_kv_cache_scales.json"
"""Made by examples/kv_cache_scales from another text."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

native = pytest.mark.skipif(load_library() is None, reason="Ksana was installed without a C++ compiler")

BACKENDS = [pytest.param("cpu", marks=native), "cpu-torch"]
CACHES = ["fp8_e4m3", "fp8_e5m2"]


def greedy(kv_cache_dtype: str) -> list[list[int]]:
    with LLM("demo", dtype="bfloat16", num_blocks=300, kv_cache_dtype=kv_cache_dtype) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def agreement(actual: list[list[int]], expected: list[list[int]]) -> float:
    """Share of the tokens before the first that differs: behind it the texts are different ones anyhow."""
    equal = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, e, strict=True)))
        for a, e in zip(actual, expected, strict=True)
    ]
    return sum(equal) / sum(map(len, expected))


def top_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Log probabilities of the five likeliest tokens behind a prompt."""
    [output] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    assert output.logprobs is not None
    return torch.tensor([value for _, value in output.logprobs[0].top])


def perplexity(text: str, **options: Any) -> float:
    """Of the demo model, on the first 500 tokens."""
    with LLM("demo", dtype="bfloat16", num_blocks=64, **options) as llm:
        tokens = llm.engine.tokenizer.encode(text)[:500]
        [output] = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
    logprobs = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


@native
def test_greedy_text_mostly_agrees_with_that_of_the_models_own_cache() -> None:
    """A scale or an exponent that is wrong would leave nothing of it."""
    own = greedy("auto")
    assert agreement(greedy("fp8_e4m3"), own) > 0.6
    assert agreement(greedy("fp8_e5m2"), own) > 0.4


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_factors_the_perplexity_is_that_of_bfloat16(backend: str) -> None:
    text = TEXT.read_text()
    plain = perplexity(text, backend=backend)
    scaled = perplexity(text, backend=backend, kv_cache_dtype="fp8_e4m3", kv_cache_scales=str(SCALES))
    assert scaled == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CACHES)
def test_logprobs_stay_close(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], backend: str, dtype: str, name: str
) -> None:
    prompt, options = list(range(3, 90)), {"backend": backend, "dtype": dtype}
    exact = top_logprobs(start_llm(tiny_path(), **options), prompt)
    eight_bits = top_logprobs(start_llm(tiny_path(), kv_cache_dtype=name, **options), prompt)
    assert 0 < (exact - eight_bits).abs().max() < 0.3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_reads_its_own_tokens_as_later_ones_do(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], backend: str
) -> None:
    """Whether they are computed in one step, in several, or have been found in the cache."""
    prompt, options = list(range(3, 90)), {"backend": backend, "dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}
    whole = top_logprobs(llm := start_llm(tiny_path(), **options), prompt)
    cached = top_logprobs(llm, prompt)
    chunked = top_logprobs(start_llm(tiny_path(), max_num_batched_tokens=16, **options), prompt)
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-3)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_factors_of_the_models_folder_are_used(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], tmp_path: Path, backend: str
) -> None:
    """So small that all numbers are cut, they leave nothing of the text; all are 1 in a cache of another dtype."""
    folder, options = tmp_path / "model", {"backend": backend, "dtype": "float32"}
    shutil.copytree(tiny_path(), folder)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    factors = {str(layer): 1e-6 for layer in range(layers)}
    content = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}}
    (folder / "kv_cache_scales.json").write_text(json.dumps(content))
    prompt = list(range(3, 90))
    plain, with_file = (
        top_logprobs(start_llm(path, kv_cache_dtype="fp8_e5m2", **options), prompt) for path in (tiny_path(), folder)
    )
    assert torch.equal(plain, with_file)
    cut = top_logprobs(start_llm(folder, kv_cache_dtype="fp8_e4m3", **options), prompt)
    assert (plain - cut).abs().max() > 0.3


def test_the_example_writes_factors_that_cut_nothing(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "scales.json"
    text.write_text("The capital of France is Paris. " * 20)
    script = Path(__file__).parents[2] / "examples/kv_cache_scales/calibrate.py"
    command = [sys.executable, str(script), "--model", str(tiny_path()), "--output", str(output), str(text)]
    subprocess.run(command, check=True, timeout=60)
    cache = CacheConfig(kv_cache_dtype="fp8_e4m3", kv_cache_scales=str(output))
    layers = json.loads((tiny_path() / "config.json").read_text())["num_hidden_layers"]
    factors = load_kv_scales(tiny_path(), cache, layers)
    assert len(factors) == layers
    assert all(0.1 < factor * 448 < 100 for factor in factors)


def test_a_damaged_file_of_factors_ends_the_start(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    path = tmp_path / "scales.json"
    path.write_text('{"kv_cache": 1}')
    with pytest.raises(UsageError, match=str(path)):
        start_llm(tiny_path(), kv_cache_dtype="fp8_e4m3", kv_cache_scales=str(path))
