"""What is captured of a prompt is what transformers computes, however the prompt was cut, cached or preempted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ksana.engine.llm import LLM
from ksana.types.capture import Capture
from ksana.types.output import FinishReason
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

PROMPT = [5 + 7 * i % 50 for i in range(45)]
POSITIONS = [0, 1, 17, 30, 43, 44]


@pytest.fixture
def reference(tiny_path: Callable[..., Path]) -> dict[str, np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.inference_mode():
        answer = model(torch.tensor([PROMPT]), output_hidden_states=True)
    return {
        "hidden": kept[0][0].numpy(),
        "normed": answer.hidden_states[-1][0].numpy(),
        "logits": answer.logits[0].numpy(),
        "logprobs": answer.logits[0].log_softmax(-1).numpy(),
    }


def finish(llm: LLM, **fields: Any) -> Any:
    [output] = llm._run(llm._finish(RequestDraft(prompt_token_ids=PROMPT, **fields)))
    return output


@pytest.mark.parametrize(
    "options", [{}, {"split_fuse_token_num": 7}, {"enable_async": True, "split_fuse_token_num": 4}]
)
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_captured_rows_equal_transformers(
    tiny_path: Callable[..., Path],
    start_llm: Callable[..., LLM],
    reference: dict[str, np.ndarray],
    options: dict[str, Any],
    max_tokens: int,
) -> None:
    """The second time the prompt is in the cache, and nothing may be missing for that."""
    llm = start_llm(tiny_path(), dtype="float32", **options)
    captures = (Capture("hidden", POSITIONS), Capture("normed", [44]), Capture("logits", POSITIONS))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    first, second = (finish(llm, captures=captures, sampling=sampling) for _ in range(2))
    assert len(first.token_ids) == max_tokens
    for capture, rows, again in zip(captures, first.captured, second.captured, strict=True):
        np.testing.assert_allclose(rows, reference[capture.kind][list(capture.positions)], atol=2e-4)
        np.testing.assert_array_equal(rows, again)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs[0] is None
    for position, entry in enumerate(first.prompt_logprobs[1:]):
        expected = reference["logprobs"][position]
        assert entry.token_id == PROMPT[position + 1]
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=2e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(np.sort(expected)[:-3:-1], abs=2e-4)
    assert len(first.prompt_logprobs) == len(PROMPT)


def test_a_cached_prefix_before_the_first_captured_position_is_used(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], reference: dict[str, np.ndarray]
) -> None:
    llm = start_llm(tiny_path(), dtype="float32")
    sampling = SamplingParams(max_tokens=0)
    finish(llm, sampling=sampling)
    output = finish(llm, sampling=sampling, captures=(Capture("logits", [40]),))
    assert output.stats.num_cached_tokens == 32
    np.testing.assert_allclose(output.captured[0][0], reference["logits"][40], atol=2e-4)
    assert finish(llm, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)).stats.num_cached_tokens == 0


def test_all_sequences_of_a_prompt_have_its_log_probabilities(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    for max_num_seqs in (8, 2):
        llm = start_llm(tiny_path(), max_num_seqs=max_num_seqs)
        outputs = llm.generate(PROMPT, SamplingParams(n=4, max_tokens=2, prompt_logprobs=1, ignore_eos=True))
        assert len(outputs[0].prompt_logprobs) == len(PROMPT)
        assert all(output.prompt_logprobs == outputs[0].prompt_logprobs for output in outputs)


@pytest.mark.parametrize("max_num_seqs", [8, 2])
def test_a_mean_counts_no_token_twice(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], max_num_seqs: int
) -> None:
    """Each sequence computes the prompt's last token, or all of it, once more."""
    llm = start_llm(tiny_path(), max_num_seqs=max_num_seqs)
    mean = (Capture("mean", range(len(PROMPT))),)
    alone = finish(llm, captures=mean, sampling=SamplingParams(max_tokens=0)).captured[0]
    draft = RequestDraft(prompt_token_ids=PROMPT, captures=mean, sampling=SamplingParams(n=4, max_tokens=3))
    for output in llm._run(llm._finish(draft)):
        np.testing.assert_array_equal(output.captured[0], alone)


def test_preempted_requests_keep_their_log_probabilities(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    sampling = SamplingParams(max_tokens=40, prompt_logprobs=1, temperature=0.0, ignore_eos=True)
    prompts = [[(i + shift) % 60 for i in range(45)] for shift in range(4)]
    roomy = start_llm(tiny_path()).generate(prompts, sampling)
    tight = start_llm(tiny_path(), num_blocks=14, split_fuse_token_num=16, launch_block_threshold=1)
    outputs = tight.generate(prompts, sampling)
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    for one, other in zip(outputs, roomy, strict=True):
        assert (one.prompt_logprobs, one.token_ids) == (other.prompt_logprobs, other.token_ids)


def test_an_abort_before_the_prompt_is_computed_has_no_rows(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM]
) -> None:
    llm = start_llm(tiny_path(), max_num_seqs=1)

    async def abort_one_that_waits() -> Any:
        running = RequestDraft(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        waiting = RequestDraft(prompt_token_ids=PROMPT, captures=(Capture("hidden", [3]),))
        async with await llm.engine.submit(running), await llm.engine.submit(waiting) as stream:
            stream.abort()
            return await stream.result()

    output = llm._run(abort_one_that_waits())
    assert (output.finish_reason, output.captured) == (FinishReason.ABORT, [])
