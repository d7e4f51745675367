"""What the openai client gets from chat answers that are more than text: calls, reasoning, log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig
from ksana_openai_api import plugin

ASK: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OPTIONS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}


@pytest.fixture
def chat(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    """A client of a server that reads hermes calls and DeepSeek-R1's reasoning."""
    config = KsanaConfig(plugin_options={"openai_api": OPTIONS})
    with (
        live_server(engine, plugin, config=config) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def streamed(client: openai.OpenAI, **request: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the chunks of choice 0 add up to, and all chunks."""
    chunks = list(client.chat.completions.create(model="ksana-llm", messages=ASK, stream=True, **request))
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in (c for c in chunk.choices if c.index == 0):
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(message["calls"])
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
    return message, chunks


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_arrive_apart(chat: openai.OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.answer = f"think</think>Let me see. {CALL}"
    if stream:
        message, _ = streamed(chat, tools=TOOLS)
        assert message == {
            "content": "Let me see.",
            "reasoning": "think",
            "calls": [["weather", '{"city": "Rome"}']],
            "finish_reason": "tool_calls",
        }
        return
    [choice] = chat.chat.completions.create(model="ksana-llm", messages=ASK, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra == {"reasoning_content": "think"}
    [call] = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')


def test_calls_without_tools_in_the_request_are_text(chat: openai.OpenAI, engine: ScriptedEngine) -> None:
    """The parser must not run where the client cannot expect calls."""
    engine.answer = f"</think>{CALL}"
    message, _ = streamed(chat)
    assert (message["calls"], message["content"], message["finish_reason"]) == ([], CALL, "stop")
    message, _ = streamed(chat, tools=TOOLS, tool_choice="none")
    assert (message["calls"], message["content"]) == ([], CALL)
    assert engine.drafts[-1].chat_template_kwargs.get("tools") is None


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most_if_the_client_wants_no_parallel_ones(
    chat: openai.OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.answer = f"</think>{CALL}{CALL}"
    for parallel, expected in ((True, 2), (False, 1)):
        if stream:
            message, _ = streamed(chat, tools=TOOLS, parallel_tool_calls=parallel)
            assert len(message["calls"]) == expected
        else:
            answer = chat.chat.completions.create(
                model="ksana-llm", messages=ASK, tools=TOOLS, parallel_tool_calls=parallel
            )
            assert len(answer.choices[0].message.tool_calls or ()) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_gets_arguments_of_its_schema(
    client: openai.OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    """No parser option is needed, and the engine is told the schema of the parameters, and to accept no others."""
    engine.answer = '{"city": "Rome"}'
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    if stream:
        message, _ = streamed(client, tools=TOOLS, tool_choice=choice)
        calls, finish = message["calls"], message["finish_reason"]
    else:
        answer = client.chat.completions.create(model="ksana-llm", messages=ASK, tools=TOOLS, tool_choice=choice)
        message_calls: Any = answer.choices[0].message.tool_calls or ()
        calls = [[call.function.name, call.function.arguments] for call in message_calls]
        finish = answer.choices[0].finish_reason
    assert (calls, finish) == ([["weather", '{"city": "Rome"}']], "tool_calls")
    grammar = engine.drafts[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.value) == {**TOOLS[0]["function"]["parameters"], "additionalProperties": False}


def test_required_calls_are_a_list_that_the_engine_enforces(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
    message, _ = streamed(client, tools=TOOLS, tool_choice="required")
    assert message["calls"] == [["weather", '{"city": "Rome"}'], ["now", "{}"]]
    assert message["content"] == ""
    grammar = engine.drafts[-1].sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.value)
    assert schema["minItems"] == 1
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["weather", "now"]
    # A call that may have more than name and arguments may go on with them for ever.
    assert [call["additionalProperties"] for call in schema["items"]["anyOf"]] == [False, False]
    assert engine.drafts[-1].chat_template_kwargs["tools"] == TOOLS


def test_definitions_of_one_name_in_two_tools_do_not_meet(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """Classes of two modules become definitions of the same name; a schema may also refer to the whole of itself."""
    engine.answer = '[{"name": "one", "arguments": {"unit": "m"}}]'
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "next": {"$ref": "#"}},
                    "$defs": {"Unit": {"enum": units}},
                },
            },
        }
        for name, units in [("one", ["m", "km"]), ("two", ["s", "h"])]
    ]
    client.chat.completions.create(model="ksana-llm", messages=ASK, tools=tools, tool_choice="required")
    grammar = engine.drafts[-1].sampling.grammar
    assert grammar is not None
    calls = json.loads(grammar.value)["items"]["anyOf"]
    for index, units in enumerate([["m", "km"], ["s", "h"]]):
        arguments = calls[index]["properties"]["arguments"]
        place = f"#/items/anyOf/{index}/properties/arguments"
        assert arguments["properties"] == {"unit": {"$ref": f"{place}/$defs/Unit"}, "next": {"$ref": place}}
        assert arguments["$defs"]["Unit"]["enum"] == units


def test_a_forced_call_that_is_cut_off_keeps_its_reason(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = '{"city": "Rome"}'
    answer = client.chat.completions.create(
        model="ksana-llm",
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=5,
    )
    assert answer.choices[0].finish_reason == "length"
    call: Any = (answer.choices[0].message.tool_calls or ())[0]
    assert call.function.arguments == '{"cit'


def test_structure_waits_for_the_end_of_reasoning(chat: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = 'think</think>{"a": 1}'
    answer = chat.chat.completions.create(
        model="ksana-llm", messages=ASK, response_format={"type": "json_object"}, max_tokens=50
    )
    assert answer.choices[0].message.content == '{"a": 1}'
    sampling = engine.drafts[-1].sampling
    assert sampling.grammar is not None and sampling.grammar.kind == "json_object"
    assert bytes(sampling.grammar_after) == b"</think>"


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type": "null"}',
        ),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": '{"type":"null"}'}, "json_schema", '{"type":"null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ],
)
def test_structures_reach_the_engine(
    client: openai.OpenAI, engine: ScriptedEngine, fields: dict[str, Any], kind: str, value: str
) -> None:
    client.chat.completions.create(model="ksana-llm", messages=ASK, extra_body=fields)
    client.completions.create(model="ksana-llm", prompt="Hi", extra_body=fields)
    for draft in engine.drafts:
        grammar = draft.sampling.grammar
        assert grammar is not None and (grammar.kind, grammar.value) == (kind, value)


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_its_log_probabilities(client: openai.OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.answer = "aß"
    if stream:
        _, chunks = streamed(client, logprobs=True, top_logprobs=2)
        entries = [entry for c in chunks for o in c.choices if o.logprobs for entry in o.logprobs.content or ()]
    else:
        answer = client.chat.completions.create(model="ksana-llm", messages=ASK, logprobs=True, top_logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert [(entry.token, entry.bytes, entry.logprob) for entry in entries] == [
        ("a", [0x61], -0.25),
        ("\ufffd", [0xC3], -0.25),
        ("\ufffd", [0x9F], -0.25),
    ]
    assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("a", -0.25), ("b", -0.5)]


def test_log_probabilities_of_the_chosen_token_alone(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="ksana-llm", messages=ASK, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(not entry.top_logprobs and entry.logprob == -0.25 for entry in logprobs.content or ())


def test_completion_log_probabilities_tell_where_tokens_stand(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="ksana-llm", prompt="Hi", logprobs=2)
    logprobs: Any = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text == "Hello, world!"
    assert logprobs.text_offset == list(range(13))
    assert logprobs.top_logprobs[0] == {"H": -0.25, "I": -0.5}
    chunks = list(client.completions.create(model="ksana-llm", prompt="Hi", logprobs=2, stream=True))
    found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for piece in found for offset in piece.text_offset] == list(range(13))


def test_an_echo_comes_first_and_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="ksana-llm", prompt=["Hi ", [72, 105]], echo=True)
    assert [choice.text for choice in answer.choices] == ["Hi Hello, world!", "HiHello, world!"]
    chunks = client.completions.create(model="ksana-llm", prompt="Hi ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hi Hello, world!"


def test_assistant_calls_reach_the_template_as_objects(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    client.chat.completions.create(model="ksana-llm", messages=messages)
    _, assistant, result = engine.drafts[-1].messages or ()
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    call["function"]["arguments"] = "{oops"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="ksana-llm", messages=messages)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_parse_gives_an_object_of_the_clients_own(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    engine.answer = '{"name": "Rome", "people": 3}'
    answer = client.chat.completions.parse(model="ksana-llm", messages=ASK, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Rome", people=3)
