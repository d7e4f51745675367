"""The items of a conversation: as they are kept and listed, and as messages for the chat template."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ksana.errors import RequestError
from ksana.server.json_body import parse_json
from ksana_openai_api.requests import Message
from ksana_openai_api.responses.requests import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

Item = dict[str, Any]
"""An item in the form in which it is kept: with an id, and with content that is a list of parts."""


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return f"{prefix}_{uuid.uuid4().hex}"


def is_json_object(text: str) -> bool:
    """True if ``text`` is what a call's arguments should be."""
    try:
        return isinstance(parse_json(text.encode()), dict)
    except (RequestError, UnicodeEncodeError):
        return False


def kept_items(given: Sequence[InputItem], previous: Sequence[Item]) -> list[Item]:
    """The conversation so far: ``previous``, and behind it a request's ``input``.

    Raises:
        RequestError: arguments of a call cannot be read, or a tool answers a call that there is not.
    """
    calls = {item["call_id"] for item in previous if item["type"] == "function_call"}
    for index, item in enumerate(given):
        if isinstance(item, FunctionCallItem):
            calls.add(item.call_id)
            if item.status != "incomplete" and not is_json_object(item.arguments):
                param = f"input[{index}].arguments"
                raise RequestError(f"{param} must be the JSON text of an object", param=param)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in calls:
            param = f"input[{index}].call_id"
            raise RequestError(f"{param}: no call before it has the id {item.call_id!r}", param=param)
    return [*previous, *map(_kept, given)]


def chat_messages(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """The conversation as messages. What the model thought, said and called in one go is one message.

    Args:
        items: as :func:`kept_items` gives them.
        instructions: come first.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        else:
            if not messages or not _goes_on(messages[-1], item):
                messages.append({"role": "assistant", "content": ""})
            _add_to_assistant(messages[-1], item)
    return [Message(**message) for message in messages]


def _goes_on(message: dict[str, Any], item: Item) -> bool:
    """Whether ``item``, of the model, belongs into ``message`` beside what is there."""
    if message["role"] != "assistant" or item["type"] == "reasoning":
        return False
    return item["type"] == "function_call" or not (message["content"] or "tool_calls" in message)


def _add_to_assistant(message: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        message["reasoning_content"] = _text(item.get("content") or [])
    elif item["type"] == "message":
        message["content"] = _text(item["content"])
    elif is_json_object(item["arguments"]):  # a call that broke off has never been made
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _text(parts: Sequence[dict[str, Any]]) -> str:
    """Parts are joined as chat templates get them from chat completions too."""
    return "\n".join(part["text"] for part in parts)


def _kept(item: InputItem) -> Item:
    match item:
        case MessageItem():
            return _kept_message(item)
        case FunctionCallItem():
            return {
                "id": item.id or new_id("fc"),
                "type": "function_call",
                "status": item.status if item.status == "incomplete" else "completed",
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
            }
        case FunctionCallOutputItem():
            return {
                "id": item.id or new_id("fco"),
                "type": "function_call_output",
                "status": "completed",
                "call_id": item.call_id,
                "output": "\n".join(part.text for part in item.output),
            }
        case ReasoningItem():
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            return {"id": item.id or new_id("rs"), "type": "reasoning", "summary": [], "content": content}


def _kept_message(item: MessageItem) -> Item:
    kind: dict[str, Any] = {"type": "input_text"}
    if item.role == "assistant":
        kind = {"type": "output_text", "annotations": []}
    return {
        "id": item.id or new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": item.role,
        "content": [{**kind, "text": part.text} for part in item.content],
    }
