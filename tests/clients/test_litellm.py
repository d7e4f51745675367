"""LiteLLM, as a program that reaches many providers through it would use it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

litellm = pytest.importorskip("litellm", reason="needs Python 3.11")

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


class Answer(BaseModel):
    certain: bool


@pytest.fixture(params=["openai/ksana-llm", "hosted_vllm/ksana-llm"])
def request_to(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    """The provider for servers that speak OpenAI's API, and the one for those that speak vLLM's."""
    return {
        "model": request.param,
        "api_base": base_url,
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 12,
    }


def test_whole_streamed_and_asynchronous_answers_agree(request_to: dict[str, Any]) -> None:
    whole = litellm.completion(**request_to)
    text = whole.choices[0].message.content
    assert "Paris" in text
    chunks = list(litellm.completion(**request_to, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert built.choices[0].message.content == text
    assert built.usage.total_tokens == whole.usage.total_tokens
    assert asyncio.run(litellm.acompletion(**request_to)).choices[0].message.content == text


def test_tools_and_structure(request_to: dict[str, Any]) -> None:
    request = {**request_to, "max_tokens": 100}
    called = litellm.completion(**request, tools=[TOOL], tool_choice="required").choices[0]
    assert json.loads(called.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    assert called.finish_reason == "tool_calls"
    chunks = list(litellm.completion(**request, tools=[TOOL], tool_choice="required", stream=True))
    [call, *_] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert call.function.arguments == called.message.tool_calls[0].function.arguments
    structured = litellm.completion(**request, response_format=Answer)
    Answer.model_validate_json(structured.choices[0].message.content)


def test_choices_and_log_probabilities(request_to: dict[str, Any]) -> None:
    request = {**request_to, "temperature": 1.2, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2}
    choices = litellm.completion(**request).choices
    assert len({choice.message.content for choice in choices}) == 2
    assert all(len(token.top_logprobs) == 2 for choice in choices for token in choice.logprobs.content)


def test_texts_embeddings_and_responses(base_url: str) -> None:
    target: dict[str, Any] = {"api_base": base_url, "api_key": "none"}
    text = litellm.text_completion(
        model="text-completion-openai/ksana-llm",
        prompt="The capital of France is",
        max_tokens=6,
        temperature=0,
        **target,
    )
    assert "Paris" in text.choices[0].text
    vectors = litellm.embedding(model="openai/ksana-llm", input=["one", "two"], **target).data
    assert len(vectors) == 2 and len(vectors[0]["embedding"]) == len(vectors[1]["embedding"])
    answer = litellm.responses(
        model="openai/ksana-llm", input=QUESTION[0]["content"], temperature=0, max_output_tokens=12, **target
    )
    assert "Paris" in answer.output[0].content[0].text


def test_refusals_are_the_exceptions_that_callers_expect(request_to: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**request_to, "temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**request_to, "messages": [{"role": "user", "content": "word " * 9000}]})
