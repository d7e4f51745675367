"""The official Python client: responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

REQUEST: dict[str, Any] = {"model": "ksana-llm", "temperature": 0, "max_output_tokens": 12}
QUESTION = "What is the capital of France?"


class Answer(BaseModel):
    city: Literal["Paris", "Rome", "Madrid"]
    certain: bool


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_every_way_to_ask_gives_the_same_answer(client: openai.OpenAI, base_url: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as asynchronous:
            return (await asynchronous.responses.create(**REQUEST, input=QUESTION)).output_text

    whole = client.responses.create(**REQUEST, input=QUESTION)
    assert "Paris" in whole.output_text
    with client.responses.stream(**REQUEST, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.status == whole.status
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert asyncio.run(ask()) == whole.output_text


def test_a_stored_response_is_continued_read_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**REQUEST, input="My name is Ada.", instructions="Be brief.")
    second = client.responses.create(**REQUEST, input="What is my name?", previous_response_id=first.id)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(client.responses.input_items.list(second.id, limit=1).data) == 1
    assert len(list(client.responses.input_items.list(second.id, limit=1))) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_loop_that_executes_the_call(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {**REQUEST, "max_output_tokens": 100, "tools": [WEATHER]}
    first = client.responses.create(**request, input="What is the weather in Paris?", tool_choice="required")
    call = first.output[-1]
    assert call.type == "function_call" and call.name == "get_weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**request, input=[result], previous_response_id=first.id, tool_choice="none")
    assert second.output_text
    with client.responses.stream(**request, input="What is the weather in Paris?", tool_choice="required") as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
    assert streamed == call.arguments


def test_parse_returns_what_it_was_given_as_a_class(client: openai.OpenAI) -> None:
    request = {**REQUEST, "max_output_tokens": 60, "text_format": Answer}
    found = client.responses.parse(**request, input=QUESTION).output_parsed
    assert isinstance(found, Answer)
    with client.responses.stream(**request, input=QUESTION) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == found
