"""The official Python client: calls of tools, and answers of a given structure."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field


class Unit(str, Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class GetWeather(BaseModel):
    """Tell the weather of a city."""

    city: str = Field(max_length=20)
    unit: Unit


class Address(BaseModel):
    street: str = Field(max_length=20)
    number: int | None = Field(ge=0, le=999)


class Person(BaseModel):
    name: str = Field(max_length=20)
    unit: Unit
    addresses: list[Address] = Field(max_length=2)


WEATHER: Any = openai.pydantic_function_tool(GetWeather)
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
REQUEST: dict[str, Any] = {"model": "ksana-llm", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 150}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}])
def test_a_loop_that_executes_calls_until_the_model_answers(client: openai.OpenAI, choice: Any) -> None:
    messages: list[Any] = list(QUESTION)
    first = client.chat.completions.create(
        **{**REQUEST, "messages": messages}, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls or []
    assert call.type == "function" and call.function.name == "GetWeather"
    arguments = GetWeather.model_validate_json(call.function.arguments)
    messages += [
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": f"It is 21 degrees {arguments.unit.value} and sunny."},
    ]
    second = client.chat.completions.create(
        **{**REQUEST, "messages": messages, "max_completion_tokens": 30}, tools=[WEATHER], tool_choice="none"
    ).choices[0]
    assert second.message.content and not second.message.tool_calls


def test_streamed_calls_add_up_to_the_whole_one(client: openai.OpenAI) -> None:
    request = {**REQUEST, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**request).choices[0].message
    [expected] = whole.tool_calls or []
    assert isinstance(expected.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**request) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        [found] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert found.function.parsed_arguments == expected.function.parsed_arguments
    assert found.id != expected.id
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("GetWeather", json.loads(expected.function.arguments))
    ]


def test_a_model_that_may_call_tools_may_as_well_answer(client: openai.OpenAI) -> None:
    message = (
        client.chat.completions.create(**{**REQUEST, "max_completion_tokens": 8}, tools=[WEATHER]).choices[0].message
    )
    assert message.content and not message.tool_calls


def test_parse_returns_what_it_was_given_as_a_class(client: openai.OpenAI) -> None:
    request = {**REQUEST, "messages": [{"role": "user", "content": "Invent a person."}], "response_format": Person}
    whole = client.chat.completions.parse(**request).choices[0]
    assert whole.finish_reason == "stop"
    assert isinstance(whole.message.parsed, Person)
    with client.chat.completions.stream(**request) as stream:
        snapshots = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message.parsed
    assert final == whole.message.parsed
    assert snapshots[-1] == final.model_dump(mode="json")


def test_an_answer_that_is_cut_off_is_told_from_a_whole_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**REQUEST, "max_completion_tokens": 3}, response_format=Person)


def test_json_mode(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        **{**REQUEST, "seed": 1, "max_completion_tokens": 400}, response_format={"type": "json_object"}
    ).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").lstrip().startswith("{")
