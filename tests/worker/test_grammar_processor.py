"""Masks of grammars on the logits of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ksana.testing.scripted_engine import ByteTokenizer
from ksana.text.grammar import Grammar
from ksana.text.llguidance_grammar import GuidanceCompiler
from ksana.types.grammar import GrammarSpec
from ksana.types.sampling import SamplingParams
from ksana.types.step import NewRequestData
from ksana.worker.logits_processor import BANNED
from ksana.worker.processors.grammar import GrammarProcessor

EOS = 256
VOCAB = 300
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def number() -> Grammar:
    return GuidanceCompiler(ByteTokenizer(), VOCAB, (EOS,)).compile(GrammarSpec("regex", "[0-9]{2}"))


def request(name: str, grammar: Grammar | None, output: bytes = b"", after: bytes = b"") -> NewRequestData:
    return NewRequestData(
        name,
        [*PROMPT, *output],
        0,
        (),
        SamplingParams(grammar_after=tuple(after)),
        0,
        len(PROMPT),
        stop_token_ids=frozenset({EOS}),
        grammar=grammar,
    )


def left(processor: GrammarProcessor, *names: str) -> list[list[int]]:
    """The tokens that may come next, by row."""
    logits = torch.randn(len(names), VOCAB)
    before = logits.clone()
    processor.apply(logits, list(names))
    kept = logits != BANNED
    assert torch.equal(logits[kept], before[kept])
    return [np.flatnonzero(row).tolist() for row in kept.numpy()]


def test_each_row_follows_its_own_text(number: Grammar) -> None:
    processor = GrammarProcessor(VOCAB)
    assert processor.add(request("a", number))
    assert processor.add(request("b", number, b"1"))
    assert not processor.add(request("free", None))
    digits, everything = list(b"0123456789"), list(range(VOCAB))
    processor.accept("b", ord("2"))
    assert left(processor, "a", "free", "b") == [digits, everything, [EOS]]
    processor.remove("a")
    assert left(processor, "a", "b") == [everything, [EOS]]


def test_a_request_that_comes_back_goes_on_where_it_was(number: Grammar) -> None:
    processor = GrammarProcessor(VOCAB)
    processor.add(request("a", number))
    for token in b"12":
        interrupted = left(processor, "a")
        processor.remove("a")
        processor.add(request("a", number, b"1" if token == ord("2") else b""))
        assert left(processor, "a") == interrupted
        processor.accept("a", token)
    assert left(processor, "a") == [[EOS]]


@pytest.mark.parametrize("interrupted_at", range(8))
def test_the_grammar_holds_from_the_end_of_the_reasoning_on(number: Grammar, interrupted_at: int) -> None:
    processor = GrammarProcessor(VOCAB)
    processor.add(request("a", number, after=b"<<>"))
    text = b"9<<<>42"
    for position, token in enumerate(text):
        if position == interrupted_at:
            processor.remove("a")
            processor.add(request("a", number, text[:position], after=b"<<>"))
        [possible] = left(processor, "a")
        if position < 5:
            assert possible == [t for t in range(VOCAB) if t != EOS]  # an end without an answer is none
        else:
            assert possible == list(b"0123456789")
        processor.accept("a", token)
    assert left(processor, "a") == [[EOS]]
