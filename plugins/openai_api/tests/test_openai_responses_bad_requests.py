"""Bodies for a response that are wrong: each is a 4xx that names the field, and nothing is ever a 5xx."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana_openai_api import plugin

pytestmark = pytest.mark.timeout(60)

TOOL = {"type": "function", "name": "f", "parameters": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
SCHEMA = {"type": "json_schema", "name": "x"}


@pytest.fixture(scope="module")
def module_url() -> Iterator[str]:
    with live_server(ScriptedEngine(), plugin) as base:
        yield base


def post(url: str, body: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": 3}]}, "input[0]"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{**CALL, "status": "incomplete", "arguments": "{"}]}, None),
        ({"input": [{"type": "function_call_output", "call_id": "d", "output": ""}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[1].output"),
        ({"input": "x" * 500}, "input"),
        ({"instructions": ["Be kind."]}, "instructions"),
        ({"model": 3}, "model"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5.5}, "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"include": "x"}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": SCHEMA}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": "not a name"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"previous_response_id": 3}, "previous_response_id"),
    ],
)
def test_bad_fields(module_url: str, fields: dict[str, Any], param: str | None) -> None:
    status, answer = post(module_url, {"input": "Hi", **fields})
    if param is None:
        assert status == 200, answer
        return
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert set(answer["error"]) == {"message", "type", "code", "param"}
    assert len(answer["error"]["message"]) < 300


def test_input_is_required(module_url: str) -> None:
    status, answer = post(module_url, {})
    assert (status, answer["error"]["param"]) == (400, "input")


def test_a_million_errors_are_told_as_one(module_url: str) -> None:
    status, answer = post(module_url, {"input": [1] * 1_000_000})
    assert (status, answer["error"]["param"]) == (400, "input[0]")
    assert len(answer["error"]["message"]) < 200


TEXT = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "text", "reasoning_text", "refusal"])},
    optional={"text": TEXT | JSON},
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([None, "message", "function_call", "function_call_output", "reasoning", "x"]) | JSON,
        "id": st.none() | TEXT,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
        "call_id": st.sampled_from(["a", "b"]),
        "name": TEXT,
        "arguments": st.sampled_from(["{}", '{"a": 1}', "[", "null", '{"a": NaN}']) | TEXT,
        "output": TEXT | st.lists(PART, max_size=2) | JSON,
        "status": st.sampled_from(["completed", "incomplete", "in_progress", "x"]),
        "summary": JSON,
    },
)


@settings(max_examples=150)
@given(items=st.lists(ITEM, max_size=4) | JSON)
def test_no_input_is_an_error_of_ours(module_url: str, items: Any) -> None:
    status, answer = post(module_url, {"input": items})
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]["param"].startswith("input"), answer
