"""Chat templates: the Jinja programs of model folders that turn messages into a prompt.

The environment follows the conventions that templates in circulation rely on: blocks are trimmed, ``break`` and
``continue`` work, ``tojson`` writes plain JSON, ``raise_exception`` refuses a conversation, ``strftime_now`` gives the
date and ``{% generation %}`` (a training aid) is transparent. Templates come from downloaded folders, so they run in
Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ksana.errors import ModelLoadError, RequestError

_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """A compiled chat template. Rendering is thread safe.

    Args:
        source: the template.
        bos_token, eos_token: strings that the template may write.

    Raises:
        ModelLoadError: the template is not valid Jinja.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" (line {line})"
            raise ModelLoadError(f"the model's chat template is not valid Jinja{where}: {error}") from error

    def render(self, messages: Sequence[dict[str, Any]], /, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt for a conversation.

        Args:
            messages: each with at least a ``role``; ``content`` is a string or a list of text parts, whose texts are
                joined by line breaks, because text templates expect strings.
            add_generation_prompt: end with the header of the assistant's answer.
            kwargs: further variables of the template, for example ``enable_thinking``.

        Raises:
            RequestError: the messages are malformed, or the template refuses or cannot render them.
        """
        clash = sorted(_RESERVED.intersection(kwargs))
        if clash:
            raise RequestError(f"chat_template_kwargs must not set {clash[0]}", param="chat_template_kwargs")
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **kwargs,
            "messages": [_plain_message(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _Refusal as refusal:
            raise RequestError(f"the model's chat template refuses the messages: {refusal}", param="messages") from None
        except Exception as error:
            # A template is a program over the client's data: any error of the interpreter may come out of it, for
            # example a TypeError where it adds text to a content that the message lacks.
            raise RequestError(
                f"the model's chat template cannot render the messages: {error}", param="messages"
            ) from error


def _plain_message(message: object, index: int) -> dict[str, Any]:
    """A copy that templates can use: keys without a value dropped, text parts joined."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object, not {type(message).__name__}", param=where)
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), (list, tuple)):
        plain["content"] = "\n".join(
            _part_text(part, f"{where}.content[{number}]") for number, part in enumerate(plain["content"])
        )
    elif "content" in plain and not isinstance(plain["content"], str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    return plain


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object, not {type(part).__name__}", param=where)
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise RequestError(f"{where}: only text parts are supported, not type {part.get('type')!r}", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return text


class _Refusal(jinja2.TemplateError):
    """Raised by a template through ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012  declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _create_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _create_environment()
