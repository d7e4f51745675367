"""Speculative decoding: the same answers, sooner."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ksana import LLM, SamplingParams, UsageError
from ksana.types.output import FinishReason, RequestOutput

StartLLM = Callable[..., LLM]

PROMPT = [7, 8, 9, 10, 11, 12, 7, 8, 9]
EAGER = {"step_overhead": 1000.0}


def seen(output: RequestOutput) -> tuple[Any, ...]:
    return (
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        len(output.logprobs),
        output.stats.num_output_tokens,
    )


@pytest.fixture
def both(tiny_path: Callable[..., Path], start_llm: StartLLM) -> Callable[..., Iterator[LLM]]:
    """An engine without drafts, and one whose drafter has learned ``prompt``'s answer."""

    def start(prompt: list[int] = PROMPT, **options: Any) -> Iterator[LLM]:
        yield start_llm(tiny_path(), **options)
        drafting = start_llm(tiny_path(), speculative="trie", **EAGER, **options)
        drafting.generate(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        yield drafting

    return start


def test_every_end_falls_on_the_same_token(both: Callable[..., Iterator[LLM]]) -> None:
    """Stop tokens, the model's own end, and the limit, wherever they are in a run of accepted drafts."""
    plain, drafting = both()
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [output] = plain.generate(PROMPT, free)
    ends = [
        *({"max_tokens": count} for count in range(1, 20)),
        *({"max_tokens": 40, "stop_token_ids": (token,)} for token in set(output.token_ids)),
    ]
    for end in ends:
        params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, **end)
        [expected], [actual] = plain.generate(PROMPT, params), drafting.generate(PROMPT, params)
        assert seen(actual) == seen(expected)
    counted = drafting.engine.snapshot()
    assert counted.accepted_draft_tokens > 100


def test_the_longest_request_ends_at_the_model_s_limit(both: Callable[..., Iterator[LLM]]) -> None:
    for limit in range(20, 30):
        plain, drafting = both(max_model_len=limit)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        [expected], [actual] = plain.generate(PROMPT, params), drafting.generate(PROMPT, params)
        assert seen(actual) == seen(expected)
        assert (len(actual.token_ids), actual.finish_reason) == (limit - len(PROMPT), FinishReason.LENGTH)


def test_accepted_drafts_are_found_in_the_cache(both: Callable[..., Iterator[LLM]]) -> None:
    _, drafting = both()
    [first] = drafting.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    turn = first.prompt_token_ids + first.token_ids
    [second] = drafting.generate([[*turn, 5, 6]], SamplingParams(max_tokens=1))
    assert second.stats.num_cached_tokens == (len(turn) - 1) // 16 * 16


@pytest.mark.parametrize("method", ["ngram", "trie"])
def test_drafts_make_steps_fewer_and_are_counted(
    tiny_path: Callable[..., Path], start_llm: StartLLM, method: str
) -> None:
    llm = start_llm(tiny_path(), speculative=method)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    outputs = [llm.generate(PROMPT, params)[0] for _ in range(2)]
    counted = llm.engine.snapshot()
    assert outputs[0].token_ids == outputs[1].token_ids
    assert counted.output_tokens == 200
    # Each step but those that are dropped, or compute a prompt, gives one token and what was accepted.
    assert 200 <= counted.num_steps + counted.accepted_draft_tokens <= 204
    assert 0 < counted.accepted_draft_tokens <= counted.draft_tokens


def test_sampled_tokens_have_the_model_s_distribution(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    """Of four tokens in succession, the last two of which are drafted, at least."""
    llm = start_llm(tiny_path(), speculative="trie", max_num_seqs=8, num_blocks=1000, **EAGER)
    expected = dict(paths(llm, (), 1.0))
    assert sum(expected.values()) == pytest.approx(1.0)
    count = 2000
    params = [SamplingParams(max_tokens=6, temperature=2.0, top_k=2, seed=s, ignore_eos=True) for s in range(count)]
    found = Counter(tuple(output.token_ids[:4]) for output in llm.generate([PROMPT] * count, params))
    assert found.keys() <= expected.keys()
    statistic = sum((found[path] - count * share) ** 2 / (count * share) for path, share in expected.items())
    # Of 16 cells. A larger one comes once in ten thousand times; the seeds are always the same.
    assert len(expected) == 16
    assert statistic < 44.3
    counted = llm.engine.snapshot()
    assert 0.2 < counted.accepted_draft_tokens / counted.draft_tokens < 0.8


def paths(llm: LLM, before: tuple[int, ...], share: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Each path of four tokens of the two likeliest, with its probability, from the model's log probabilities."""
    if len(before) == 4:
        yield before, share
        return
    [output] = llm.generate([[*PROMPT, *before]], SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True))
    top = output.logprobs[0].top
    weights = [math.exp(logprob / 2.0) for _, logprob in top]
    for (token, _), weight in zip(top, weights, strict=True):
        yield from paths(llm, (*before, token), share * weight / sum(weights))


def test_requests_of_all_kinds_at_once(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    """Everybody's own: stops, log probabilities, and penalties that follow from the tokens before each place."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.5, "logprobs": 1},
        {"temperature": 0.0, "stop": ["a", "e"]},
        {"temperature": 1.2, "top_k": 5, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.7, "no_repeat_ngram_size": 2},
        {"temperature": 0.0, "logit_bias": ((30, 3.0), (31, -3.0))},
    ]
    params = [
        SamplingParams(max_tokens=30, seed=seed, ignore_eos=True, **kind)
        for seed, kind in zip(range(24), itertools.cycle(kinds))
    ]
    prompts = [[token % 7 + 20 for token in range(seed, seed + 5 + seed % 9)] for seed in range(24)]
    plain = start_llm(tiny_path(), max_num_seqs=8)
    drafting = start_llm(tiny_path(), max_num_seqs=8, speculative="trie", **EAGER)
    expected = list(map(seen, plain.generate(prompts, params)))
    for _ in range(2):
        assert list(map(seen, drafting.generate(prompts, params))) == expected
    counted = drafting.engine.snapshot()
    assert 0 < counted.accepted_draft_tokens < counted.draft_tokens


def test_a_plugin_brings_a_drafter(
    tiny_path: Callable[..., Path], start_llm: StartLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_drafts.py").write_text(
        """
from ksana import hookimpl

calls = []

class Echo:
    def start(self, request):
        calls.append("start")

    def propose(self, request, limit):
        return [request.all_token_ids[-1]] * limit

    def update(self, request, new_token_ids):
        calls.append("update")

    def finish(self, request):
        calls.append("finish")

@hookimpl
def ksana_create_drafter(config):
    return Echo() if config.method == "echo" else None
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "echo_drafts", raising=False)
    llm = start_llm(tiny_path(), plugins=("echo_drafts",), speculative="echo")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate(PROMPT, params)
    [expected] = start_llm(tiny_path()).generate(PROMPT, params)
    assert output.token_ids == expected.token_ids
    assert llm.engine.snapshot().draft_tokens > 0
    import echo_drafts  # type: ignore[import-not-found]

    assert (echo_drafts.calls[0], echo_drafts.calls[-1]) == ("start", "finish")
    assert echo_drafts.calls.count("start") == echo_drafts.calls.count("finish") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "medusa"}, "no plugin has the method of --speculative medusa; built in are ngram and trie"),
        ({"speculative": "ngram", "min_ngram": 5, "max_ngram": 3}, "--min-ngram 5 is more than --max-ngram 3"),
    ],
)
def test_a_method_that_cannot_work_is_refused(
    tiny_path: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(tiny_path(), num_blocks=100, **options)
