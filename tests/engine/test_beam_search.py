"""Beam search answers what transformers' does, whatever else is in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ksana import LLM, RequestError, SamplingParams
from ksana.testing import TransformersOracle
from ksana.types.output import FinishReason, RequestOutput

StartLLM = Callable[..., LLM]

PROMPT = list(range(3, 24))


@cache
def oracle(path: Path) -> TransformersOracle:
    return TransformersOracle(path)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Transformers computes on the threads that the engine does not use: a second team would only be in its way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def beams(num_beams: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"num_beams": num_beams, "n": num_beams, "ignore_eos": True, "max_tokens": 12, **options})


def ends_of(llm: LLM) -> tuple[int, ...]:
    """Some tokens that come up in the beams of a search, so that texts end there."""
    outputs = llm.generate(PROMPT, beams(5, max_tokens=14))
    return tuple({output.token_ids[place] for place, output in zip((3, 6, 9, 11), outputs, strict=False)})


def check(outputs: list[RequestOutput], expected: list[tuple[list[int], float]]) -> None:
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected]
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_tokens_and_scores_are_transformers(
    tiny_path: Callable[..., Path], start_llm: StartLLM, architecture: str, early_stopping: Any
) -> None:
    path = tiny_path(architecture)
    llm = start_llm(path)
    cases = itertools.product((2, 5), (1.0, 0.0, -1.5), (1, 14), ((), ends_of(llm)))
    ended_early = 0
    for num_beams, length_penalty, max_tokens, ends in cases:
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        theirs = {**options, "max_new_tokens": max_tokens, "eos_token_id": list(ends) or None}
        expected = oracle(path).beam_search(PROMPT, num_beams, **theirs)
        outputs = llm.generate(PROMPT, beams(num_beams, **options, max_tokens=max_tokens, stop_token_ids=ends))
        check(outputs, expected)
        for output in outputs:
            stopped = output.token_ids[-1] in ends
            assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            ended_early += len(output.token_ids) < max_tokens
    assert ended_early > 5


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"encoder_no_repeat_ngram_size": 1}, {"encoder_no_repeat_ngram_size": 1}),
        ({"min_tokens": 5}, {"min_new_tokens": 5}),
        ({"logit_bias": {5: 3.0, 9: -4.0}}, {"sequence_bias": [[[5], 3.0], [[9], -4.0]]}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_processors_change_log_probabilities_as_transformers_do(
    tiny_path: Callable[..., Path], start_llm: StartLLM, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    llm = start_llm(tiny_path())
    ends = ends_of(llm)
    expected = oracle(tiny_path()).beam_search(PROMPT, 4, max_new_tokens=12, eos_token_id=list(ends), **theirs)
    check(llm.generate(PROMPT, beams(4, stop_token_ids=ends, **options)), expected)


def test_smollm2_is_transformers(start_llm: StartLLM) -> None:
    llm = start_llm("demo", dtype="float32", threads=2)
    theirs = oracle(llm.engine.context.model_path)
    prompt = llm.engine.tokenizer.encode("The three most important rivers of Europe are")
    for num_beams, length_penalty in ((4, 1.0), (3, 0.0)):
        options = {"length_penalty": length_penalty}
        expected = theirs.beam_search(prompt, num_beams, **options, max_new_tokens=10, eos_token_id=[0, 28, 30])
        check(llm.generate(prompt, beams(num_beams, **options, max_tokens=10, stop_token_ids=(0, 28, 30))), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"split_fuse_token_num": 4},
        {"num_blocks": 28, "block_size": 4, "enable_prefix_caching": False, "launch_block_threshold": 1},
        {"num_blocks": 28, "block_size": 4, "split_fuse_token_num": 3, "launch_block_threshold": 1},
        {"max_num_seqs": 8, "max_num_batched_tokens": 8},
        {"speculative": "ngram"},
    ],
    ids=str,
)
def test_a_search_does_not_depend_on_its_neighbours(
    tiny_path: Callable[..., Path], start_llm: StartLLM, options: dict[str, Any]
) -> None:
    """Nor they on it: bit for bit, with preemptions, chunks, cached prefixes and one step ahead."""
    params = [
        beams(4, stop_token_ids=(5, 9), logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1),
        beams(3, n=1, length_penalty=0.0, repetition_penalty=1.2, max_tokens=20),
        SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=16, ignore_eos=True),
    ]
    prompts = [PROMPT, PROMPT[:11], [*PROMPT, 7, 7], PROMPT[3:]]
    plain = start_llm(tiny_path(), enable_prefix_caching=False)
    alone = [outcome(o) for p, s in zip(prompts, params, strict=True) for o in plain.generate([p], s)]
    crowded = start_llm(tiny_path(), **options)
    for _ in range(2):
        assert [outcome(output) for output in crowded.generate(prompts, params)] == alone
    if options.get("num_blocks"):
        assert crowded.engine.snapshot().preemptions > 0


def outcome(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.score, output.logprobs, output.finish_reason


def test_log_probabilities_are_the_models_own(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    for options in ({"length_penalty": 0.0}, {"repetition_penalty": 1.3}):
        for output in llm.generate(PROMPT, beams(3, logprobs=2, **options)):
            expected = oracle(tiny_path()).output_logits(output).log_softmax(-1)
            for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
                assert entry.token_id == token
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
            if "length_penalty" in options:
                assert sum(entry.logprob for entry in output.logprobs) == pytest.approx(output.score, rel=1e-4)
    assert llm.generate(PROMPT, beams(2))[0].logprobs == []


def test_the_models_length_ends_beams(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(), max_model_len=30)
    outputs = llm.generate(PROMPT, beams(3, max_tokens=None))
    check(outputs, oracle(tiny_path()).beam_search(PROMPT, 3, max_new_tokens=9))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": ("x",)}, "stop"),
        ({"best_of": 4}, "best_of"),
        ({"n": 5}, "n"),
        ({"max_tokens": 0}, "num_beams"),
        ({"num_beams": 9}, "num_beams"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    tiny_path: Callable[..., Path], start_llm: StartLLM, options: dict[str, Any], param: str
) -> None:
    llm = start_llm(tiny_path(), max_num_seqs=8)
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, beams(**{"num_beams": 4, "n": 1, **options}))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_search_that_bans_every_token_fails_alone(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(vocab_size=64))
    neighbour = SamplingParams(temperature=0.0, max_tokens=5)
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPT, list(range(64))], [neighbour, beams(2, no_repeat_ngram_size=1)])
    assert (caught.value.status, caught.value.code) == (400, "no_token_left")
    assert llm.generate(PROMPT, neighbour)


def test_counters_know_the_tokens_of_all_results(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path())
    outputs = llm.generate([PROMPT], beams(4, n=2, max_tokens=6))
    counted = llm.engine.snapshot()
    assert counted.output_tokens == sum(len(output.token_ids) for output in outputs) == 12
    assert counted.prompt_tokens == len(PROMPT)
    assert counted.finished == {"length": 2}
    assert [output.stats.num_output_tokens for output in outputs] == [6, 6]
