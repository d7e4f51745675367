"""vllm#6521: a request for no output, which wants its prompt computed and nothing more, ended the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.types.output import FinishReason

NOTHING = SamplingParams(max_tokens=0, logprobs=2)
SOMETHING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("enable_async", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_fuse_token_num": 4},
        {"split_fuse_token_num": 1},
        {"speculative": "trie", "step_overhead": 1000.0, "split_fuse_token_num": 7},
        {"num_blocks": 14, "block_size": 4, "enable_prefix_caching": False},
    ],
    ids=["whole", "chunks", "chunks of one", "drafts", "preempted"],
)
def test_a_request_for_no_output_ends_with_its_prompt(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    """Whatever the length of its prompt, first and again with the prompt in the cache, beside those that decode."""
    llm = start_llm(tiny_path(), **options)
    prompts = [[5 + i] * length for i, length in enumerate([1, 2, 4, 5, 16, 17, 30])]
    alone = [llm.generate([prompt], SOMETHING)[0].token_ids for prompt in prompts]
    for _ in range(2):
        outputs = llm.generate(prompts + prompts, [NOTHING] * len(prompts) + [SOMETHING] * len(prompts))
        assert [output.token_ids for output in outputs[len(prompts) :]] == alone
        for output in outputs[: len(prompts)]:
            assert (output.text, output.token_ids, output.logprobs) == ("", [], [])
            assert output.finish_reason is FinishReason.LENGTH
            assert (output.stats.num_output_tokens, output.stats.first_token_time) == (0, None)
