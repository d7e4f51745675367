"""Processors of a batch against Hugging Face's classes, one row at a time, token after token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ksana.types.sampling import SamplingParams
from ksana.types.step import NewRequestData
from ksana.worker.logits_processor import BANNED, LogitsProcessors
from ksana.worker.processors.logit_bias import LogitBias
from ksana.worker.processors.penalties import Penalties
from ksana.worker.processors.token_bans import TokenBans

VOCAB = 12
STOPS = frozenset({3, 5})

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)
WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


def processors() -> LogitsProcessors:
    return LogitsProcessors([Penalties(), TokenBans(VOCAB), LogitBias()])


def request(
    name: str, prompt: list[int], output: Sequence[int] = (), words: Sequence[tuple[int, ...]] = (), **options: Any
) -> NewRequestData:
    return NewRequestData(
        name,
        [*prompt, *output],
        0,
        (),
        SamplingParams(**options),
        0,
        len(prompt),
        stop_token_ids=STOPS,
        bad_words=tuple(words),
    )


def logits_of(rows: int) -> torch.Tensor:
    values = np.random.default_rng(rows).normal(scale=3, size=(rows, VOCAB))
    return torch.from_numpy(values.astype(np.float32))


def applied(chain: LogitsProcessors, logits: torch.Tensor, names: list[str]) -> np.ndarray:
    """What the chain makes of a copy; banned tokens as infinity, as Hugging Face has them."""
    changed = logits.clone()
    chain.apply(changed, names)
    result = changed.numpy()
    return np.where(result <= BANNED, -np.inf, result)


def check_against(
    theirs: Callable[[int], Any], prompt: list[int], output: list[int], words: Any = (), **options: Any
) -> None:
    """Over a whole output, in a batch with a request that asks for nothing of it, and after a preemption half way.

    Args:
        theirs: makes Hugging Face's processor for a prompt of that length.
    """
    nothing = {"logit_bias": {0: 0.0}}
    chain, reference, asked = processors(), theirs(len(prompt)), {**nothing, **options}
    chain.add(request("own", prompt, words=words, **asked))
    chain.add(request("other", prompt, **nothing))
    for position in range(len(output) + 1):
        if position == len(output) // 2:
            chain.remove("own")
            chain.add(request("own", prompt, output[:position], words, **asked))
        logits = logits_of(2)
        known = torch.tensor([[*prompt, *output[:position]]])
        actual = applied(chain, logits, ["other", "own"])
        np.testing.assert_allclose(actual[1], reference(known, logits[1:].clone())[0].numpy(), rtol=1e-6)
        np.testing.assert_array_equal(actual[0], logits[0].numpy())
        if position < len(output):
            chain.accept("own", output[position])


@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.3, 0.9, 1.3, 7.0]))
def test_repetition_penalty(prompt: list[int], output: list[int], penalty: float) -> None:
    check_against(
        lambda _: RepetitionPenaltyLogitsProcessor(penalty=penalty), prompt, output, repetition_penalty=penalty
    )


@given(prompt=TOKENS, output=TOKENS, size=st.integers(1, 5))
def test_ngrams_of_prompt_and_output(prompt: list[int], output: list[int], size: int) -> None:
    check_against(lambda _: NoRepeatNGramLogitsProcessor(size), prompt, output, no_repeat_ngram_size=size)


@given(prompt=TOKENS, output=TOKENS, size=st.integers(1, 4))
def test_ngrams_of_the_prompt(prompt: list[int], output: list[int], size: int) -> None:
    check_against(
        lambda _: EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([prompt])),
        prompt,
        output,
        encoder_no_repeat_ngram_size=size,
    )


@given(prompt=TOKENS, output=TOKENS, size=st.integers(1, 4))
def test_ngrams_of_the_output(prompt: list[int], output: list[int], size: int) -> None:
    ban = NoRepeatNGramLogitsProcessor(size)
    check_against(
        lambda length: lambda known, scores: ban(known[:, length:], scores),
        prompt,
        output,
        decoder_no_repeat_ngram_size=size,
    )


@given(prompt=TOKENS, output=TOKENS, words=WORDS)
def test_bad_words(prompt: list[int], output: list[int], words: list[tuple[int, ...]]) -> None:
    check_against(lambda _: NoBadWordsLogitsProcessor(list(map(list, words))), prompt, output, words)


@given(prompt=TOKENS, output=TOKENS, count=st.integers(0, 16))
def test_min_tokens(prompt: list[int], output: list[int], count: int) -> None:
    check_against(
        lambda length: MinNewTokensLengthLogitsProcessor(length, count, list(STOPS)), prompt, output, min_tokens=count
    )


@given(
    prompt=TOKENS, output=TOKENS, biases=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1)
)
def test_logit_bias(prompt: list[int], output: list[int], biases: dict[int, float]) -> None:
    check_against(
        lambda _: SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}),
        prompt,
        output,
        logit_bias=biases,
    )


@given(prompt=TOKENS, output=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_penalties(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """As OpenAI's reference has it: of the output alone."""

    def penalized(known: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, count in Counter(known[0, len(prompt) :].tolist()).items():
            scores[0, token] -= np.float32(count * np.float32(frequency)) + np.float32(presence)
        return scores

    options = {"presence_penalty": presence, "frequency_penalty": frequency}
    check_against(lambda _: penalized, prompt, output, **options)


@given(data=st.data(), count=st.integers(1, 6))
def test_what_a_row_gets_does_not_depend_on_the_others(data: st.DataObject, count: int) -> None:
    """All options at once, bit for bit; and a banned token stays banned whatever else is asked."""
    chain, rows = processors(), logits_of(count)
    names = [f"r{i}" for i in range(count)]
    biased = data.draw(st.integers(0, VOCAB - 1))
    for name in names:
        options: dict[str, Any] = {
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2])),
            "frequency_penalty": data.draw(st.sampled_from([0.0, 0.7])),
            "no_repeat_ngram_size": data.draw(st.sampled_from([0, 1, 2])),
            "logit_bias": {biased: 100.0},
            "min_tokens": data.draw(st.integers(0, 20)),
        }
        chain.add(request(name, data.draw(TOKENS), data.draw(TOKENS), data.draw(WORDS), **options))
    together = applied(chain, rows, names)
    for name, row, changed in zip(names, rows, together, strict=True):
        np.testing.assert_array_equal(applied(chain, row[None], [name])[0], changed)
    order = data.draw(st.permutations(range(count)))
    np.testing.assert_array_equal(applied(chain, rows[order], [names[i] for i in order]), together[order])


def test_tokens_beyond_the_models_vocabulary_need_no_ban() -> None:
    """A tokenizer may know more tokens than the model has logits for, added ones for example."""
    chain = processors()
    chain.add(
        NewRequestData(
            "r",
            [1],
            0,
            (),
            SamplingParams(min_tokens=2),
            0,
            1,
            stop_token_ids=frozenset({VOCAB, 2}),
            bad_words=((VOCAB,), (1, VOCAB), (4,)),
        )
    )
    [row] = applied(chain, logits_of(1), ["r"])
    assert np.flatnonzero(np.isinf(row)).tolist() == [2, 4]


def test_nothing_is_left_of_requests_that_have_gone() -> None:
    chain = processors()
    for i in range(3):
        chain.add(request(f"r{i}", [1, 2], repetition_penalty=1.5, no_repeat_ngram_size=2, logit_bias={1: 1.0}))
        chain.remove(f"r{i}")
    chain.remove("never added")
    assert len(chain) == 0
    assert not any(state for processor in chain._processors for state in vars(processor).values() if state != VOCAB)
