"""The Responses API by way of the official client."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig
from ksana_openai_api import plugin

pytestmark = pytest.mark.timeout(30)

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OPTIONS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def parsing_url(engine: ScriptedEngine) -> Iterator[str]:
    """A server that reads hermes calls and DeepSeek-R1's reasoning."""
    with live_server(engine, plugin, config=KsanaConfig(plugin_options={"openai_api": OPTIONS})) as base:
        yield base


@pytest.fixture
def parsing_client(parsing_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parsing_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(url: str, **body: Any) -> bytes:
    data = json.dumps({"input": "Hi", **body}).encode()
    request = urllib.request.Request(f"{url}/v1/responses", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: bytes = answer.read()
        return found


def whole(url: str, **body: Any) -> dict[str, Any]:
    """A response that the client's own model takes without a complaint."""
    found: dict[str, Any] = json.loads(post(url, **body))
    Response.model_validate(found)
    return found


def events_of(url: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which the client's own models take without a complaint."""
    events = []
    for frame in post(url, stream=True, **body).decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types in short, deltas in a row as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before or "delta" not in name]


def without_ids(value: Any) -> Any:
    """``value`` less what differs between two equal answers."""
    if isinstance(value, dict):
        drawn = {"id", "call_id", "created_at", "completed_at"}
        return {key: without_ids(each) for key, each in value.items() if key not in drawn}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_a_response(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    response = client.responses.create(
        model="ksana-llm", input="Hi", instructions="Be kind.", temperature=0.5, top_p=0.9, metadata={"a": "b"}
    )
    assert response.output_text == "Hello, world!"
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "scripted")
    assert (response.temperature, response.top_p, response.metadata) == (0.5, 0.9, {"a": "b"})
    prompt = len("system: Be kind.\nuser: Hi\n")
    assert response.usage is not None
    assert response.usage.model_dump() == {
        "input_tokens": prompt,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0, "cache_write_tokens_details": None},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 13,
    }
    sampling = engine.drafts[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, None)


def test_the_events_of_a_text(url: str) -> None:
    events = events_of(url)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "Hello, world!"
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


def test_the_events_of_reasoning_text_and_calls(parsing_url: str, engine: ScriptedEngine) -> None:
    engine.answer = f"think</think>Let me see. {CALL}{CALL}"
    events = events_of(parsing_url, tools=TOOLS)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    response = events[-1]["response"]
    assert response["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "think"}]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["name"], first["arguments"]) == ("weather", '{"city": "Rome"}')
    assert first["call_id"] != second["call_id"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("think</think>")


@pytest.mark.parametrize(
    "answer",
    [
        "Hello, world!",
        "",
        "thinks to the end",
        "think</think>Answer",
        f"think</think>{CALL}",
        f"think</think>one {CALL} two {CALL} three",
        'think</think><tool_call>\n{"name": "weather", "arguments": {"city": "Ro',
    ],
)
@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"max_output_tokens": 20}])
def test_streamed_and_whole_are_the_same(
    parsing_url: str, engine: ScriptedEngine, answer: str, more: dict[str, Any]
) -> None:
    engine.answer = answer
    events = events_of(parsing_url, tools=TOOLS, **more)
    assert without_ids(events[-1]["response"]) == without_ids(whole(parsing_url, tools=TOOLS, **more))
    texts = {event["item_id"]: "" for event in events if "delta" in event}
    for event in events:
        if "delta" in event:
            texts[event["item_id"]] += event["delta"]
    for item in events[-1]["response"]["output"]:
        assert texts.get(item["id"], "") == (
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        )


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI, url: str) -> None:
    response = client.responses.create(model="ksana-llm", input="Hi", max_output_tokens=5)
    assert (response.output_text, response.status, response.output[0].status) == ("Hello", "incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert events_of(url, max_output_tokens=5)[-1]["type"] == "response.incomplete"


def test_a_failure_before_the_first_token_is_a_status_and_a_later_one_an_event(
    client: openai.OpenAI, engine: ScriptedEngine, url: str
) -> None:
    engine.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="ksana-llm", input="Hi", stream=True)
    engine.fail_after = 3
    last = events_of(url)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the scripted failure"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last["response"]["id"])
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="ksana-llm", input="Hi")


def test_the_clients_helpers_follow_a_stream(parsing_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = f"think</think>Let me see. {CALL}"
    with parsing_client.responses.stream(model="ksana-llm", input="Hi", tools=TOOLS) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == "Let me see."
    call: Any = final.output[-1]
    assert call.parsed_arguments == {"city": "Rome"}


class City(BaseModel):
    name: str
    people: int


def test_parse_gives_an_object_of_the_clients_own(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = '{"name": "Rome", "people": 3}'
    assert client.responses.parse(model="ksana-llm", input="Hi", text_format=City).output_parsed == City(
        name="Rome", people=3
    )
    grammar = engine.drafts[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.value)["required"]) == ("json_schema", ["name", "people"])
    with client.responses.stream(model="ksana-llm", input="Hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome", people=3)


def test_the_asynchronous_client(url: str) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            first = await client.responses.create(model="ksana-llm", input="Hi")
            stream = await client.responses.create(
                model="ksana-llm", input="And?", previous_response_id=first.id, stream=True
            )
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            async with client.responses.stream(model="ksana-llm", input="Hi") as helper:
                final = await helper.get_final_response()
            return [first.output_text, "".join(deltas), final.output_text]

    assert asyncio.run(talk()) == ["Hello, world!"] * 3


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    first = client.responses.create(model="ksana-llm", input="Hi", instructions="Be kind.")
    second = client.responses.create(model="ksana-llm", input="And?", previous_response_id=first.id)
    client.responses.create(
        model="ksana-llm", input="So?", previous_response_id=second.id, instructions="Be brief.", stream=True
    ).close()
    said = [[(m["role"], m["content"]) for m in draft.messages or ()] for draft in engine.drafts]
    turns = [("user", "Hi"), ("assistant", "Hello, world!"), ("user", "And?"), ("assistant", "Hello, world!")]
    assert said[1] == turns[:3]
    assert said[2] == [("system", "Be brief."), *turns, ("user", "So?")]
    assert second.previous_response_id == first.id


def test_a_tool_loop(parsing_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = f"think</think>Let me see. {CALL}"
    ask: Any = {"model": "ksana-llm", "tools": TOOLS}
    first = parsing_client.responses.create(input="Weather?", **ask)
    call: Any = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    parsing_client.responses.create(input=[result], previous_response_id=first.id, **ask)
    # The same with the conversation kept by the client.
    history: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), result]
    parsing_client.responses.create(input=history, store=False, **ask)
    assert engine.drafts[1].messages == engine.drafts[2].messages
    _, assistant, tool = engine.drafts[1].messages or ()
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "think")
    [made] = assistant["tool_calls"]
    assert (made["id"], made["function"]) == (call.call_id, {"name": "weather", "arguments": {"city": "Rome"}})
    assert tool == {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}
    names = [tool["function"]["name"] for tool in engine.drafts[1].chat_template_kwargs["tools"]]  # type: ignore[attr-defined]
    assert names == ["weather", "now"]


def test_a_call_that_broke_off_does_not_stand_in_the_way(parsing_client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = 'think</think><tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    first = parsing_client.responses.create(model="ksana-llm", input="Weather?", tools=TOOLS)
    assert first.output[-1].status == "incomplete"  # type: ignore[union-attr]
    parsing_client.responses.create(model="ksana-llm", input="Again", previous_response_id=first.id)
    assert all("tool_calls" not in message for message in engine.drafts[-1].messages or ())


@pytest.mark.parametrize(
    ("choice", "kind", "names"),
    [
        ("required", "json_schema", ["weather", "now"]),
        ({"type": "function", "name": "now"}, "json_schema", ["weather", "now"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, None, ["now"]),
        ("none", None, None),
    ],
)
def test_tool_choice(
    parsing_client: openai.OpenAI, engine: ScriptedEngine, choice: Any, kind: str | None, names: list[str] | None
) -> None:
    response = parsing_client.responses.create(model="ksana-llm", input="Hi", tools=TOOLS, tool_choice=choice)
    echoed = response.tool_choice
    assert (echoed if isinstance(echoed, str) else echoed.to_dict()) == choice
    assert [tool.to_dict()["name"] for tool in response.tools] == ["weather", "now"]
    [draft] = engine.drafts
    given: Any = draft.chat_template_kwargs.get("tools")
    assert given is None if names is None else [tool["function"]["name"] for tool in given] == names
    grammar = draft.sampling.grammar
    assert (None if grammar is None else grammar.kind) == kind


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.responses.create(
        model="ksana-llm",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "2"}]}
        ],
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_object"}, "verbosity": "medium"},
        truncation="disabled",
        max_output_tokens=7,
        extra_body={"seed": 3, "top_k": 4, "stop": "x", "cache_salt": "tenant", "chat_template_kwargs": {"a": 1}},
    )
    [draft] = engine.drafts
    assert draft.messages == [{"role": "user", "content": "one\n2"}]
    sampling = draft.sampling
    assert (sampling.seed, sampling.top_k, sampling.stop, sampling.max_tokens) == (3, 4, ("x",), 7)
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "json_object"
    assert draft.cache_salt == "tenant"
    assert draft.chat_template_kwargs == {"a": 1, "reasoning_effort": "low"}


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_log_probabilities_stand_beside_their_text(url: str) -> None:
    events = events_of(url, **LOGPROBS)
    [entry] = events[4]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("H", -0.25, [72])
    assert [top["token"] for top in entry["top_logprobs"]] == ["H", "I"]
    deltas = [each for event in events if event["type"].endswith("delta") for each in event["logprobs"]]
    assert deltas == whole(url, **LOGPROBS)["output"][0]["content"][0]["logprobs"]
    assert whole(url)["output"][0]["content"][0]["logprobs"] == []


def test_reasoning_and_calls_have_no_log_probabilities(parsing_url: str, engine: ScriptedEngine) -> None:
    engine.answer = f"think</think>Let me. {CALL}"
    asked = {"tools": TOOLS, **LOGPROBS}
    for response in (whole(parsing_url, **asked), events_of(parsing_url, **asked)[-1]["response"]):
        content = response["output"][1]["content"][0]
        assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"] == "Let me."


def test_a_client_that_leaves_aborts_its_request_and_nothing_is_kept(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.answer = "x" * 200
    engine.token_interval_s = 0.01
    stream = client.responses.create(model="ksana-llm", input="Hi", stream=True)
    created: Any = next(iter(stream))
    stream.close()
    while engine.num_unfinished():
        time.sleep(0.005)
    assert engine.aborted == ["r0"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)
