"""vllm#47616: a stop string in the middle of accepted drafts left tokens and log probabilities behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams
from ksana.types.output import RequestOutput

PROMPT = list(range(40, 60))


def answer(llm: LLM, **options: Any) -> tuple[Any, ...]:
    """All that a client sees, the number of tokens in its usage included."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, **options)
    output: RequestOutput
    [output] = llm.generate([PROMPT], params)
    return (
        output.text,
        output.token_ids,
        [(entry.token_id, pytest.approx(entry.logprob, abs=1e-4)) for entry in output.logprobs],
        output.finish_reason,
        output.stop_reason,
        output.stats.num_output_tokens,
    )


@pytest.mark.parametrize("include", [False, True])
def test_what_is_behind_a_stop_string_is_dropped(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], include: bool
) -> None:
    plain = start_llm(tiny_path())
    drafting = start_llm(tiny_path(), speculative="trie")
    free = answer(plain)
    assert answer(drafting) == free  # and now the tree knows the answer
    text, token_ids = free[0], free[1]
    for start in range(1, len(text) - 3, 2):
        options = {"stop": text[start : start + 3], "include_stop_str_in_output": include}
        expected = answer(plain, **options)
        assert len(expected[1]) == len(expected[2]) == expected[-1] <= len(token_ids)
        assert answer(drafting, **options) == expected
    counted = drafting.engine.snapshot()
    assert counted.accepted_draft_tokens > 4 * len(token_ids)
