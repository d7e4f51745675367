"""Bad bodies: each gets its status, the error shape and the name of the field (vllm#12886, #35438, #37011)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(30)

MESSAGES = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def post(url: str, path: str, body: object) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x", 1]}]}, "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 33, "use_beam_search": True}, "n"),
    ({"n": 3, "use_beam_search": True, "stop": "x"}, "stop"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),  # a digit for Python, not for JSON
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools[0].function"),
    ({"tools": [{**TOOL, "type": "custom"}], "tool_choice": "required"}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": [5]}, "guided_choice[0]"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"response_format": {"type": "nonsense"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"input_tokens": [-1]}, "input_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1, "bos_token": "x"}}, "chat_template_kwargs"),
]

COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1, 2.5]]}, "prompt[0][1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [2**100]}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 33, "use_beam_search": True}, "best_of"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"guided_json": 5}, "guided_json"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/chat/completions", {"messages": MESSAGES, **fields}, param) for fields, param in CHAT_FIELDS]
    + [("/v1/completions", {"prompt": "hi", **fields}, param) for fields, param in COMPLETION_FIELDS],
)
def test_bad_fields(url: str, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = post(url, path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert list(answer) == ["error"]
    assert set(answer["error"]) == {"message", "type", "code", "param"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert "instance of" not in answer["error"]["message"]  # clients know nothing of our classes


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": [{"role": "user", "content": "\\udc00"}]}'])
def test_bad_json(url: str, path: str, body: bytes) -> None:
    status, answer = post(url, path, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


def test_a_million_errors_are_told_as_one(url: str) -> None:
    for fields in ({"stop": [1] * 1_000_000}, {"messages": [1] * 1_000_000}, {"input_tokens": ["x"] * 1_000_000}):
        status, answer = post(url, "/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert (status, answer["error"]["param"]) == (400, f"{next(iter(fields))}[0]")
        assert len(answer["error"]["message"]) < 200


def test_more_prompts_than_the_queue_holds_are_refused_before_any_work(url: str, engine: Any) -> None:
    """Each prompt is a task and a tokenisation: two million of them fit a body, and stopped the server for minutes."""
    for prompt in (["a"] * 1201, [[1]] * 1201):
        status, answer = post(url, "/v1/completions", {"prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "1201 prompts" in answer["error"]["message"]
    assert not engine.drafts


def test_neutral_values_are_accepted(url: str) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "stop": None,
        "seed": None,
        "stream": None,
        "temperature": None,
    }
    assert post(url, "/v1/chat/completions", {"messages": MESSAGES, **neutral})[0] == 200
    assert post(url, "/v1/completions", {"prompt": "hi", "suffix": None, "echo": False, "best_of": 1})[0] == 200


def test_raw_stream_ends_with_done_and_a_failed_one_does_not(url: str, engine: Any) -> None:
    def raw() -> list[bytes]:
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            data: bytes = response.read()
        assert data.endswith(b"\n\n")
        return data.removesuffix(b"\n\n").split(b"\n\n")

    events = raw()
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    engine.fail_after = 3
    assert set(json.loads(raw()[-1].removeprefix(b"data: "))) == {"error"}
