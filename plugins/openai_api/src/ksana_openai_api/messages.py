"""From a request's messages to those that a chat template gets to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksana.errors import RequestError
from ksana.server.json_body import parse_json
from ksana_openai_api.requests import Message


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them; text parts are flattened, and others refused, by the template itself.

    Raises:
        RequestError: a message lacks what it must have; ``param`` names the place.
    """
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    extra = dict(message.model_extra or {})
    calls = extra.pop("tool_calls", None)
    if calls:
        extra["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    elif message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    # Templates were written for the older name, and models trained with it.
    role = "system" if message.role == "developer" else message.role
    # Templates that know calls test the content for being empty, and few of them for being absent.
    return {**extra, "role": role, "content": message.content if message.content is not None else ""}


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    """A call with its arguments as an object: over the wire they are text, but templates write them as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function and its name", param=where)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: object, where: str) -> object:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments.encode())
    except (RequestError, UnicodeEncodeError):
        param = f"{where}.function.arguments"
        raise RequestError(f"{param} must be JSON text", param=param) from None
