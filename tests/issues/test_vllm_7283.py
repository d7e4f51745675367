"""vllm#7283, #16529, #9634: an empty prompt, or an id outside the vocabulary, ended the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([5, 512], {}, "prompt"),
        ([2**63], {}, "prompt"),
        ([5] * 512, {}, "prompt"),
        ([5], {"stop_token_ids": (512,)}, "stop_token_ids"),
        ([5], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([5], {"logit_bias": {512: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {5: 1.0, 2**63: 1.0}}, "logit_bias"),
    ],
)
def test_impossible_requests_are_refused(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], prompt: Any, sampling: dict[str, Any], param: str
) -> None:
    llm = start_llm(tiny_path())
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], SamplingParams(max_tokens=2, **sampling))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
