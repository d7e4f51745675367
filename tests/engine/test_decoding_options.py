"""Penalties, bans, biases and least lengths: what a request asks for holds in its answer, and in nobody else's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ksana import LLM, RequestError, SamplingParams
from ksana.testing import TransformersOracle
from ksana.types.output import FinishReason, RequestOutput

StartLLM = Callable[..., LLM]

PROMPT = [7, 8, 9, 10, 11, 12, 7, 8, 9]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def llm(tiny_path: Callable[..., Path], start_llm: StartLLM) -> LLM:
    return start_llm(tiny_path(), max_num_seqs=6)


def greedy(llm: LLM, prompt: list[int] | str = PROMPT, **options: Any) -> RequestOutput:
    [output] = llm.generate([prompt], SamplingParams(**{**GREEDY, **options}))
    return output


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"repetition_penalty": 1.5}, lambda _: RepetitionPenaltyLogitsProcessor(1.5)),
        ({"repetition_penalty": 0.6}, lambda _: RepetitionPenaltyLogitsProcessor(0.6)),
        ({"no_repeat_ngram_size": 1}, lambda _: NoRepeatNGramLogitsProcessor(1)),
        ({"no_repeat_ngram_size": 2}, lambda _: NoRepeatNGramLogitsProcessor(2)),
        ({"encoder_no_repeat_ngram_size": 1}, lambda p: EncoderNoRepeatNGramLogitsProcessor(1, torch.tensor([p]))),
        ({"logit_bias": {5: 4.0, 6: -9.0}}, lambda _: SequenceBiasLogitsProcessor({(5,): 4.0, (6,): -9.0})),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_greedy_answers_are_transformers(
    llm: LLM, tiny_path: Callable[..., Path], options: dict[str, Any], reference: Callable[[list[int]], Any]
) -> None:
    """Every token is the likeliest after all before it, by transformers' logits and processors."""
    prompt = [*range(3, 250), *PROMPT]  # so long that an answer repeats some of it
    output = greedy(llm, prompt, **options)
    assert output.token_ids != greedy(llm, prompt).token_ids
    process, known = reference(prompt), list(prompt)
    for row, token in zip(TransformersOracle(tiny_path()).output_logits(output), output.token_ids, strict=True):
        assert process(torch.tensor([known]), row[None].clone()).argmax() == token
        known.append(token)


def test_log_probabilities_are_the_models_own(llm: LLM, tiny_path: Callable[..., Path]) -> None:
    output = greedy(llm, repetition_penalty=1.5, logprobs=0)
    expected = TransformersOracle(tiny_path()).output_logits(output).log_softmax(-1)
    for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.top == ()
    assert greedy(llm).logprobs == []


def test_neighbours_of_a_penalised_request_are_as_without_it(llm: LLM) -> None:
    plain = [SamplingParams(**GREEDY), SamplingParams(seed=4, max_tokens=30, ignore_eos=True)]
    alone = [output.token_ids for params in plain for output in llm.generate([PROMPT], params)]
    odd = SamplingParams(**GREEDY, repetition_penalty=1.5, logit_bias={5: 100.0})
    outputs = llm.generate([PROMPT] * 4, [plain[0], odd, plain[1], odd])
    assert [outputs[0].token_ids, outputs[2].token_ids] == alone
    assert (
        outputs[1].token_ids
        == outputs[3].token_ids
        == greedy(llm, repetition_penalty=1.5, logit_bias={5: 100}).token_ids
    )


def test_a_large_bias_is_a_choice_and_a_ban(llm: LLM) -> None:
    [output] = llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=8, ignore_eos=True, logit_bias={77: 100}))
    assert output.token_ids == [77] * 8
    free = greedy(llm).token_ids
    assert not set(free) & set(greedy(llm, logit_bias=dict.fromkeys(free, -100)).token_ids)


def test_bad_words_do_not_appear(llm: LLM) -> None:
    """As the tokenizer writes them, at the beginning of a text and behind a space."""
    free = greedy(llm).text
    words = tuple(word for word in free.replace("�", " ").split() if word.isascii())[:3]
    assert words
    banned = greedy(llm, bad_words=words)
    encode = llm.engine.tokenizer.encode
    for word in words:
        for form in (word, f" {word}"):
            ids = encode(form, add_special_tokens=False)
            assert all(banned.token_ids[i : i + len(ids)] != ids for i in range(30))


def test_no_end_comes_before_min_tokens(llm: LLM) -> None:
    """Neither stop tokens, nor the model's own end, nor stop strings; and all of them from there on."""
    free = greedy(llm)
    stop = free.token_ids[3]
    assert len(greedy(llm, stop_token_ids=(stop,)).token_ids) <= 4
    late = greedy(llm, stop_token_ids=(stop,), min_tokens=10)
    assert stop not in late.token_ids[:9] and len(late.token_ids) >= 10
    end = {"logit_bias": {2: 100}, "ignore_eos": False}
    assert greedy(llm, **end).token_ids == [2]
    output = greedy(llm, **end, min_tokens=6)
    assert (output.token_ids.index(2), output.finish_reason) == (6, FinishReason.STOP)
    letters = tuple("etaoins")
    assert len(greedy(llm, stop=letters).token_ids) < 12
    output = greedy(llm, stop=letters, min_tokens=12)
    assert 12 <= len(output.token_ids) < 30 and output.text.startswith(llm.engine.tokenizer.decode(free.token_ids[:11]))


def test_a_request_that_bans_every_token_fails_alone(tiny_path: Callable[..., Path], start_llm: StartLLM) -> None:
    llm = start_llm(tiny_path(vocab_size=64))
    neighbour = llm.generate([PROMPT], SamplingParams(**GREEDY))
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestError) as caught:
            llm.generate(
                [PROMPT, list(range(62))],
                [SamplingParams(**GREEDY), SamplingParams(temperature=temperature, no_repeat_ngram_size=1)],
            )
        assert (caught.value.status, caught.value.code) == (400, "no_token_left")
    assert [o.token_ids for o in llm.generate([PROMPT], SamplingParams(**GREEDY))] == [o.token_ids for o in neighbour]


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
def test_what_is_left_is_drawn_under_extreme_filters(
    tiny_path: Callable[..., Path], start_llm: StartLLM, backend: str
) -> None:
    """Nearly all tokens are banned, by numbers whose differences must not become infinite."""
    llm = start_llm(tiny_path(vocab_size=64), backend=backend)
    prompt = list(range(61))
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 63, "top_p": 0.99}):
        for temperature in (1e-8, 1.0, 100.0):
            params = SamplingParams(
                temperature=temperature, seed=3, max_tokens=2, no_repeat_ngram_size=1, ignore_eos=True, **options
            )
            [output] = llm.generate([prompt], params)
            assert len(set(output.token_ids)) == 2 and set(output.token_ids) <= {61, 62, 63}


PLUGIN = """
import torch
from ksana import hookimpl
from ksana.worker.logits_processor import BANNED

class OnlyToken:
    def __init__(self, token_id):
        self.token_id = token_id
        self.running = set()

    def add(self, request):
        if request.sampling.top_k == 123:
            self.running.add(request.request_id)
        return request.request_id in self.running

    def remove(self, request_id):
        self.running.remove(request_id)

    def apply(self, logits, request_ids):
        rows = torch.tensor([row for row, name in enumerate(request_ids) if name in self.running])
        kept = logits[rows, self.token_id]
        logits[rows] = BANNED
        logits[rows, self.token_id] = kept

    def accept(self, request_id, token_id):
        assert token_id == self.token_id

@hookimpl
def ksana_create_logits_processors(model_config, tokenizer):
    assert tokenizer.vocab_size <= model_config.vocab_size
    return [OnlyToken(99)]
"""


def test_a_processor_of_a_plugin(
    tiny_path: Callable[..., Path], start_llm: StartLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_token.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    llm = start_llm(tiny_path(), plugins=["only_token"])
    chosen = SamplingParams(top_k=123, max_tokens=5, ignore_eos=True, repetition_penalty=1.2)
    outputs = llm.generate([PROMPT] * 3, [SamplingParams(**GREEDY), chosen, SamplingParams(**GREEDY)])
    assert outputs[1].token_ids == [99] * 5
    assert outputs[0].token_ids == outputs[2].token_ids == greedy(llm).token_ids
    monkeypatch.delitem(sys.modules, "only_token")
