"""The official Python client: text."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": "ksana-llm", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 12}


def test_every_way_to_ask_gives_the_same_answer(client: openai.OpenAI, base_url: str) -> None:
    async def ask() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as asynchronous:
            whole, stream = await asyncio.gather(
                asynchronous.chat.completions.create(**CHAT), asynchronous.chat.completions.create(**CHAT, stream=True)
            )
            return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    whole = client.chat.completions.create(**CHAT)
    expected = whole.choices[0].message.content
    assert expected is not None and "Paris" in expected
    chunks = client.chat.completions.create(**CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == expected
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert asyncio.run(ask()) == (expected, expected)


def test_log_probabilities_tell_of_every_token_of_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    tokens = whole.logprobs.content
    text = bytes(byte for token in tokens for byte in token.bytes or ()).decode()
    assert text.removesuffix("<|im_end|>") == whole.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
    with client.chat.completions.stream(**CHAT, logprobs=True, top_logprobs=3) as stream:
        streamed = [token for event in stream if event.type == "logprobs.content.delta" for token in event.content]
        final = stream.get_final_completion().choices[0]
    assert [token.logprob for token in streamed] == [token.logprob for token in tokens]
    assert final.logprobs is not None and final.logprobs.content == tokens


def test_several_answers_to_one_question(client: openai.OpenAI) -> None:
    request = {**CHAT, "temperature": 1.5, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**request)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_completions_with_echo_and_log_probabilities_score_a_text(client: openai.OpenAI) -> None:
    prompt = "The capital of France is Paris"
    request: dict[str, Any] = {"model": "ksana-llm", "prompt": prompt, "temperature": 0, "logprobs": 2}
    [choice] = client.completions.create(**request, echo=True, max_tokens=4).choices
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.text_offset and found.top_logprobs
    assert "".join(found.tokens) == choice.text
    assert choice.text.startswith(prompt)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    [scored] = client.completions.create(**request, echo=True, max_tokens=0).choices
    assert scored.text == prompt
    assert scored.logprobs is not None and scored.logprobs.token_logprobs
    num_scored = len(scored.logprobs.token_logprobs)
    for first, second in zip(scored.logprobs.token_logprobs[1:], found.token_logprobs[1:num_scored], strict=True):
        assert math.isclose(first, second, abs_tol=1e-3)
    chunks = list(client.completions.create(**request, echo=True, max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    streamed = [logprobs for chunk in chunks if (logprobs := chunk.choices[0].logprobs)]
    assert [token for logprobs in streamed for token in logprobs.tokens or ()] == found.tokens
    assert [offset for logprobs in streamed for offset in logprobs.text_offset or ()] == found.text_offset


def test_the_best_of_several_completions(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "ksana-llm", "prompt": "My favourite colour is", "temperature": 1.2, "seed": 3}
    everything = client.completions.create(**request, max_tokens=6, n=4, logprobs=0).choices

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = sorted(everything, key=mean, reverse=True)[:2]
    found = client.completions.create(**request, max_tokens=6, n=2, best_of=4).choices
    assert [choice.text for choice in found] == [choice.text for choice in best]


def test_token_ids_and_lists_of_prompts(client: openai.OpenAI) -> None:
    ids = [10, 500, 3000]
    request: dict[str, Any] = {"model": "ksana-llm", "temperature": 0, "max_tokens": 4}
    [alone] = client.completions.create(**request, prompt=ids).choices
    pair = client.completions.create(**request, prompt=[ids, ids]).choices
    assert [choice.text for choice in pair] == [alone.text] * 2


def test_embeddings_are_the_same_as_numbers_and_as_base64(client: openai.OpenAI) -> None:
    texts = ["A cat sleeps.", "A kitten naps.", "Interest rates rose by a quarter point."]
    packed = client.embeddings.create(model="ksana-llm", input=texts)  # the client asks for base64 by itself
    plain = client.embeddings.create(model="ksana-llm", input=texts, encoding_format="float")
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-3)
    cat, kitten, rates = (entry.embedding for entry in packed.data)
    assert math.dist(cat, kitten) < math.dist(cat, rates)
    [short] = client.embeddings.create(model="ksana-llm", input=texts[0], dimensions=64).data
    assert len(short.embedding) == 64


def test_refusals_name_the_parameter(client: openai.OpenAI) -> None:
    for parameter, value in {"temperature": -1, "n": 0, "logit_bias": {"x": 1}, "top_logprobs": 50}.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**CHAT, "logprobs": True, parameter: value})
        assert caught.value.param == parameter
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**CHAT, "model": "gpt-nothing"})
    assert "ksana-llm" in client.models.retrieve("ksana-llm").id
