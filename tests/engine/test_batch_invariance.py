"""Tokens and log probabilities are the same, bit for bit, whatever the scheduler does with a request.

What is compared with: each prompt alone, in one piece, on one thread, with nothing cached. This is what the CPU's
native kernels promise; torch's own operators do not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.kernels.cpu.library import load_library
from ksana.types.output import RequestOutput

PROMPTS = (Path(__file__).parent / "data/prompts.txt").read_text().splitlines()

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4, "logit_bias": {11: 3.0, 12: -100.0}},
    {"temperature": 0.0, "frequency_penalty": -1.0, "bad_words": ("the", "of"), "decoder_no_repeat_ngram_size": 3},
    {"temperature": 0.7, "top_k": 50, "repetition_penalty": 0.8, "min_tokens": 4, "stop_token_ids": (11, 28)},
)
"""By turns, so that every batch is mixed, and half of it greedy."""

ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "threads": 1}
TOGETHER = {"max_num_seqs": 32, "threads": 2}

EAGER = {"step_overhead": 1000.0}
"""Drafts for everybody, though the batch is large."""

Answer = tuple[list[int], Any]


@pytest.fixture(scope="module", autouse=True)
def _native_kernels() -> None:
    if load_library() is None and os.environ.get("KSANA_REQUIRE_NATIVE", "") in ("", "0"):
        pytest.skip("Ksana was installed without a C++ compiler")


def sampling(max_tokens: int) -> list[SamplingParams]:
    """Of each prompt."""
    return [
        SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=5, ignore_eos=True, **parameters)
        for seed, parameters in zip(range(len(PROMPTS)), itertools.cycle(SAMPLING))
    ]


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    """All that has to be the same: tokens, and log probabilities of them and of the five likeliest."""
    return [(output.token_ids, output.logprobs) for output in outputs]


def check(outputs: list[RequestOutput], expected: list[Answer]) -> None:
    for number, (actual, alone) in enumerate(zip(answers(outputs), expected, strict=True)):
        assert actual == alone, f"prompt {number}: {PROMPTS[number]}"


def started(model: Path | str, **options: Any) -> LLM:
    return LLM(model, **{"backend": "cpu", "num_blocks": 1000, "check_integrity": True, **options})


def check_drafts(llm: LLM) -> None:
    """Some were accepted, and some were not."""
    counted = llm.engine.snapshot()
    assert 0 < counted.accepted_draft_tokens < counted.draft_tokens


def generate(model: Path | str, max_tokens: int, **options: Any) -> list[RequestOutput]:
    with started(model, **options) as llm:
        return llm.generate(PROMPTS, sampling(max_tokens))


# -- the demo model ----------------------------------------------------------------------------------------------------

DEMO = {"dtype": "bfloat16"}
DEMO_TOKENS = 6


@pytest.fixture(scope="module")
def demo_alone() -> list[Answer]:
    alone = answers(generate("demo", DEMO_TOKENS, **DEMO, **ALONE))
    assert all(len(logprobs) == len(tokens) and len(logprobs[0].top) == 5 for tokens, logprobs in alone)
    return alone


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"split_fuse_token_num": 1},
        {"split_fuse_token_num": 16, "enable_prefix_caching": False},
        {"split_fuse_token_num": 64, "enable_async": True},
        {"max_num_batched_tokens": 50},
    ],
    ids=["batch 32", "chunk 1", "chunk 16", "chunk 64, overlap", "budget of 50"],
)
def test_demo_model(demo_alone: list[Answer], options: dict[str, Any]) -> None:
    check(generate("demo", DEMO_TOKENS, **DEMO, **TOGETHER, **options), demo_alone)


def test_demo_model_with_warm_prefixes(demo_alone: list[Answer]) -> None:
    with started("demo", **DEMO, **TOGETHER) as llm:
        cold = llm.generate(PROMPTS, sampling(DEMO_TOKENS))
        warm = llm.generate(PROMPTS, sampling(DEMO_TOKENS))
    check(cold, demo_alone)
    check(warm, demo_alone)
    assert sum(output.stats.num_cached_tokens for output in warm) > sum(o.stats.num_prompt_tokens for o in warm) / 2


@pytest.mark.parametrize("enable_async", [False, True], ids=["serial", "overlapped"])
def test_demo_model_preempted(demo_alone: list[Answer], enable_async: bool) -> None:
    """With small blocks, of which a request needs more soon; their size makes no difference either."""
    few = {"num_blocks": 48, "block_size": 4, "launch_block_threshold": 1, "enable_async": enable_async}
    outputs = generate("demo", DEMO_TOKENS, **DEMO, **TOGETHER, **few)
    check(outputs, demo_alone)
    assert any(output.stats.num_preemptions for output in outputs)


def test_demo_model_with_drafts(demo_alone: list[Answer]) -> None:
    """At the second time, the trie knows most of the answers."""
    with started("demo", **DEMO, **TOGETHER, **EAGER, speculative="trie") as llm:
        for _ in range(2):
            check(llm.generate(PROMPTS, sampling(DEMO_TOKENS)), demo_alone)
        check_drafts(llm)


# -- tiny models -------------------------------------------------------------------------------------------------------

TINY_TOKENS = 16
TINY: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "dtype": "bfloat16"},
    "llama in float32": {"architecture": "llama", "dtype": "float32"},
    "sliding window": {"architecture": "mistral", "dtype": "bfloat16"},
    "norms of heads": {"architecture": "qwen3", "dtype": "bfloat16"},
    "norms behind": {"architecture": "gemma3", "dtype": "bfloat16"},
    "e4m3 cache": {"architecture": "llama", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "e5m2 cache": {"architecture": "mistral", "dtype": "float32", "kv_cache_dtype": "fp8_e5m2"},
}


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tiny_path: Callable[..., Path]) -> tuple[Path, dict[str, Any]]:
    """A model, and the options that belong to it."""
    options = dict(TINY[request.param])
    return tiny_path(options.pop("architecture")), options


@pytest.fixture(scope="module")
def tiny_alone(tiny: tuple[Path, dict[str, Any]]) -> list[Answer]:
    path, options = tiny
    return answers(generate(path, TINY_TOKENS, **options, **ALONE))


@pytest.mark.parametrize(
    ("chunk", "prefix_caching", "enable_async"),
    [(0, False, False), (0, True, True), (1, False, True), (1, True, False), (16, True, True), (64, True, False)],
)
def test_tiny_models(
    tiny: tuple[Path, dict[str, Any]],
    tiny_alone: list[Answer],
    chunk: int,
    prefix_caching: bool,
    enable_async: bool,
) -> None:
    path, options = tiny
    modes = {"split_fuse_token_num": chunk, "enable_prefix_caching": prefix_caching, "enable_async": enable_async}
    with started(path, **options, **TOGETHER, **modes) as llm:
        for _ in range(2 if prefix_caching else 1):
            check(llm.generate(PROMPTS, sampling(TINY_TOKENS)), tiny_alone)


@pytest.mark.parametrize(("chunk", "enable_async"), [(0, False), (16, True)])
def test_tiny_models_preempted(
    tiny: tuple[Path, dict[str, Any]], tiny_alone: list[Answer], chunk: int, enable_async: bool
) -> None:
    path, options = tiny
    # Blocks run out only if all prompts come in early.
    limits = {"num_blocks": 64, "block_size": 4, "max_mixed_prefill_tokens": 0, "launch_block_threshold": 1}
    modes = {"split_fuse_token_num": chunk, "enable_async": enable_async, **limits}
    outputs = generate(path, TINY_TOKENS, **options, **TOGETHER, **modes)
    check(outputs, tiny_alone)
    # With a window, a prompt that came in whole gives back more blocks than its answer will need.
    if chunk or "mistral" not in str(path):
        assert any(output.stats.num_preemptions for output in outputs)


@pytest.mark.parametrize(
    ("method", "chunk", "enable_async"), [("trie", 0, False), ("trie", 16, True), ("ngram", 0, True)]
)
def test_tiny_models_with_drafts(
    tiny: tuple[Path, dict[str, Any]], tiny_alone: list[Answer], method: str, chunk: int, enable_async: bool
) -> None:
    path, options = tiny
    modes = {"speculative": method, "split_fuse_token_num": chunk, "enable_async": enable_async, **EAGER}
    with started(path, **options, **TOGETHER, **modes) as llm:
        for _ in range(2):
            check(llm.generate(PROMPTS, sampling(TINY_TOKENS)), tiny_alone)
        check_drafts(llm)


@pytest.mark.parametrize("enable_async", [False, True], ids=["serial", "overlapped"])
def test_tiny_models_preempted_with_drafts(
    tiny: tuple[Path, dict[str, Any]], tiny_alone: list[Answer], enable_async: bool
) -> None:
    path, options = tiny
    limits = {"num_blocks": 150, "block_size": 4, "max_mixed_prefill_tokens": 0, "split_fuse_token_num": 16}
    limits["launch_block_threshold"] = 1
    modes = {"speculative": "trie", "num_speculative_tokens": 3, "enable_async": enable_async, **EAGER, **limits}
    with started(path, **options, **TOGETHER, **modes) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, sampling(TINY_TOKENS))
            check(outputs, tiny_alone)
        check_drafts(llm)
    if "mistral" not in str(path):  # see above
        assert any(output.stats.num_preemptions for output in outputs)
