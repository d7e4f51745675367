"""The demo model: greedy tokens equal transformers' on real prompts, one at a time and all at once."""

from __future__ import annotations

import pytest

from ksana import LLM, SamplingParams
from ksana.models.locate import resolve_model
from ksana.testing import TransformersOracle
from ksana.types.output import RequestOutput

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List five healthy breakfast ideas.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "How do I make a cup of green tea?",
    "What are the main causes of inflation?",
    "Give me three tips for learning Spanish.",
    "Describe the water cycle for a child.",
    "Write an email asking my manager for a day off.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a joke about computers.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "What should I pack for a week of hiking?",
    "Name the planets of the solar system in order.",
    "How can I improve my sleep?",
    "Explain recursion with an example.",
    "Translate 'good morning' into German, French and 日本語.",
    "What is 17 * 23? Show your work.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model("demo"))


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers(oracle: TransformersOracle) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM("demo", dtype="float32", num_blocks=1000, threads=1, check_integrity=True) as llm:
        singly = [llm.chat(conversation, GREEDY)[0] for conversation in conversations]
        batched = llm.chat(conversations, GREEDY)
    for output in singly:
        assert output.token_ids == oracle.greedy_after(output)
    assert _answers(batched) == _answers(singly)
    # The first answers were cold (but for the shared system prompt), the second found all but their last tokens.
    assert all(output.stats.num_cached_tokens > 0 for output in batched)


def _answers(outputs: list[RequestOutput]) -> list[tuple[list[int], str]]:
    return [(output.token_ids, output.text) for output in outputs]
