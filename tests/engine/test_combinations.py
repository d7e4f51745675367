"""Whatever options are combined, and whoever else is in the batch: a request's answer is the one it has alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, RequestError, SamplingParams
from ksana.types.grammar import GrammarSpec
from ksana.types.request import RequestDraft

NUM_REQUESTS = 40

GRAMMARS = (
    GrammarSpec("json_object"),
    GrammarSpec("regex", "[a-c]{3,20}"),
    GrammarSpec.choice(["alpha", "beta", "gamma delta"]),
)

CHOICES: dict[str, tuple[Any, ...]] = {
    "top_k": (1, 5, 50),
    "top_p": (0.5, 0.9),
    "min_p": (0.05,),
    "logprobs": (0, 1, 5),
    "prompt_logprobs": (0, 3),
    "repetition_penalty": (0.7, 1.4),
    "presence_penalty": (1.0,),
    "frequency_penalty": (-0.5, 0.8),
    "no_repeat_ngram_size": (1, 2, 3),
    "encoder_no_repeat_ngram_size": (1, 2),
    "decoder_no_repeat_ngram_size": (1, 2, 3),
    "logit_bias": ({5: 3.0, 6: -100.0},),
    "bad_words": (("a", "th"), ("e",)),
    "stop": (("a",), ("e", "th")),
    "include_stop_str_in_output": (True,),
    "stop_token_ids": ((11, 28, 99), tuple(range(20, 60))),
    "min_tokens": (3, 5),
    "ignore_eos": (True,),
    "grammar": GRAMMARS,
    "n": (2, 3, 5),
    "best_of": (4, 5),
    "num_beams": (2, 3),
    "early_stopping": (True, "never"),
}
"""Each is in a fifth of the requests; those whose options exclude each other are drawn again."""

MODES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempted": {"num_blocks": 45, "block_size": 4, "split_fuse_token_num": 8, "launch_block_threshold": 1},
    "small steps": {"max_num_batched_tokens": 13, "max_num_seqs": 9},
    "drafts": {"speculative": "trie", "step_overhead": 1000.0},
    "drafts, preempted": {
        "speculative": "trie",
        "step_overhead": 1000.0,
        "num_blocks": 60,
        "launch_block_threshold": 1,
        "block_size": 4,
        "split_fuse_token_num": 16,
    },
}

Case = tuple[list[int], SamplingParams]


def draw_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 203) for _ in range(60)] for _ in range(3)]
    cases: list[Case] = []
    while len(cases) < NUM_REQUESTS:
        options = {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.2}
        options["max_tokens"] = rng.choice((0, 1, 2, 5, 12, 20, 30))
        options["temperature"] = rng.choice((0.0, 0.0, 0.7, 1.5))
        prompt = rng.choice(beginnings)[: rng.choice((1, 2, 15, 16, 17, 31, 33, 40, 60))]
        try:
            cases.append((prompt, SamplingParams(seed=rng.randrange(1000), **options)))
        except RequestError:
            continue
    return cases


async def answer(llm: LLM, case: Case) -> list[tuple[Any, ...]] | str:
    """All that a client sees; of a request that fails, why."""
    prompt, sampling = case
    try:
        outputs = await llm._finish(RequestDraft(prompt_token_ids=prompt, sampling=sampling))
    except RequestError as error:
        return str(error)
    return [
        (o.text, o.token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason, o.stop_reason, o.stats.num_output_tokens)
        for o in outputs
    ]


async def answer_all(llm: LLM, cases: list[Case]) -> list[Any]:
    return await asyncio.gather(*(answer(llm, case) for case in cases))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return draw_cases(seed=1)


@pytest.fixture(scope="module")
def alone(tiny_path: Callable[..., Path], cases: list[Case]) -> list[Any]:
    with LLM(tiny_path(), num_blocks=1000, threads=1, enable_prefix_caching=False) as llm:
        return [llm._run(answer(llm, case)) for case in cases]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_does_not_depend_on_the_others(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], mode: str, cases: list[Case], alone: list[Any]
) -> None:
    llm = start_llm(tiny_path(), **{"num_blocks": 600, "max_num_seqs": 12, **MODES[mode]})
    for _ in range(2):  # the second time prefixes are cached, and drafts known
        for case, actual, expected in zip(cases, llm._run(answer_all(llm, cases)), alone, strict=True):
            assert actual == expected, case
    counted = llm.engine.snapshot()
    assert (counted.preemptions > 0) >= ("preempted" in mode)
    assert (counted.accepted_draft_tokens > 0) == ("drafts" in mode)
