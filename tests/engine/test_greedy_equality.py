"""Greedy tokens equal transformers', whatever the scheduler does to a request.

Each test catches a class of defects: a wrong mask or position after a chunk border, a prefix block with other content,
state lost in a preemption, rows mixed up in a batch, an option of an architecture that is not honoured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.kv.layout import group_layers, kv_cache_specs
from ksana.models.hf_config import load_hf_config
from ksana.testing import TransformersOracle

ROPE = {"rope_theta": 10000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 4},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma3-tied": ("gemma3", {"tie_word_embeddings": True}),
}
OUTPUT = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Eight prompts of 2 to 70 tokens; four of them begin with the same 40."""
    rng = random.Random(7)
    shared = [rng.randrange(3, 500) for _ in range(40)]
    lengths = [2, 17, 33, 64]
    alone = [[rng.randrange(3, 500) for _ in range(n)] for n in lengths]
    return alone + [shared + [rng.randrange(3, 500) for _ in range(n)] for n in (0, 1, 8, 30)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny_path: Callable[..., Path]) -> tuple[Path, TransformersOracle]:
    architecture, overrides = MODELS[request.param]
    path = tiny_path(architecture, **overrides)
    return path, TransformersOracle(path)


def check(outputs: list[Any], oracle: TransformersOracle, count: int = OUTPUT) -> None:
    for output in outputs:
        assert len(output.token_ids) == count
        assert output.token_ids == oracle.greedy_after(output)


@pytest.mark.parametrize("chunk", [0, 1, 7])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
def test_singly_and_batched(
    model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM], chunk: int, prefix_caching: bool
) -> None:
    path, oracle = model
    llm = start_llm(path, split_fuse_token_num=chunk, enable_prefix_caching=prefix_caching)
    singly = [llm.generate(prompt, GREEDY)[0] for prompt in prompts()]
    batched = llm.generate(prompts(), GREEDY)
    check(singly, oracle)
    check(batched, oracle)
    cached = [output.stats.num_cached_tokens for output in batched]
    if prefix_caching:
        assert all(tokens > 0 for tokens, prompt in zip(cached, prompts(), strict=True) if len(prompt) > 20)
    else:
        assert not any(cached)


@pytest.mark.parametrize("chunk", [0, 1, 7])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
def test_preempted(
    model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM], chunk: int, prefix_caching: bool
) -> None:
    """Eight short prompts are let in together, and outgrow a cache that has room for one long request."""
    path, oracle = model
    groups = len(group_layers(kv_cache_specs(load_hf_config(path, "auto"), 4)))
    llm = start_llm(
        path,
        split_fuse_token_num=chunk,
        enable_prefix_caching=prefix_caching,
        num_blocks=24 * groups,
        launch_block_threshold=1,
        block_size=4,
        max_model_len=80,
    )
    outputs = llm.generate([prompt[:12] for prompt in prompts()], LONGER)
    check(outputs, oracle, 40)
    assert sum(output.stats.num_preemptions for output in outputs) > 0


def test_on_plain_torch(model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM]) -> None:
    """What the other tests show of the best backend holds for the one that runs everywhere."""
    path, oracle = model
    llm = start_llm(path, backend="cpu-torch", split_fuse_token_num=7)
    check([llm.generate(prompt, GREEDY)[0] for prompt in prompts()], oracle)
    check(llm.generate(prompts(), GREEDY), oracle)


def test_generate_agrees_with_the_oracle(model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM]) -> None:
    """The oracle's single forward is a claim about decoding with a cache: here transformers decodes."""
    path, oracle = model
    prompt = prompts()[3]
    assert start_llm(path).generate(prompt, GREEDY)[0].token_ids == oracle.generate(prompt, OUTPUT)
