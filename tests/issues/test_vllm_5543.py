"""vllm#5543, #54490, #7845: prefix caching changed greedy output."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from ksana import LLM, SamplingParams


def test_prefix_cache_never_changes_tokens(tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]) -> None:
    """Cold, warm and in another order, the tokens are the same."""
    llm = start_llm(tiny_path(), max_num_seqs=6)
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(3, 60))] for _ in range(8)]
    prompts += [prompt + prompt[:7] for prompt in prompts]
    cold = {tuple(o.prompt_token_ids): o.token_ids for o in llm.generate(prompts, params)}
    for seed in range(3):
        shuffled = random.Random(seed).sample(prompts, len(prompts))
        warm = llm.generate(shuffled, params)
        assert {tuple(o.prompt_token_ids): o.token_ids for o in warm} == cold
        assert any(o.stats.num_cached_tokens for o in warm)
