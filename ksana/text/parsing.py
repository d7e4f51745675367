"""Parsers of a model's output: its text, piece by piece, becomes content, reasoning and tool calls.

A parser is pushed text as it is generated and answers with events. How the text was cut into pieces makes no difference
to what the events of one kind add up to. A parser serves one request, so a factory makes one each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ksana.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow.

    Attributes:
        index: 0 for the first call of the answer, 1 for the second.
        id: unique in the answer.
        name: of the function, which need not be among the request's tools.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call ``index``.

    The pieces of a call add up to a JSON object, as the model wrote it; ``{}`` if the function takes nothing. An answer
    that ends, or goes wrong, in the middle of the arguments leaves them incomplete.
    """

    index: int
    delta: str


ParserEvent = TextEvent | ReasoningEvent | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Turns the text of one answer into events. Neither method raises, whatever the model wrote."""

    def push(self, text: str) -> list[ParserEvent]:
        """Take the next piece of text; hold back no more than what may yet become markup."""

    def finish(self) -> list[ParserEvent]:
        """The text has ended: give out what was held back. Markup that is incomplete is content."""


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser may need to know about its request.

    Attributes:
        tools: the request's ``tools``, as the client sent them.
        chat_template_kwargs: variables of the chat template, for example ``enable_thinking``.
        prompt: the rendered prompt or its end, if it is known: a template may have begun the answer.
        tokenizer: the model's, if there is one.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class ToolParserInfo:
    """What a plugin registers for a format of tool calls.

    Attributes:
        name: for ``--tool-call-parser``.
        create: makes the parser of one request. It gives out text and tool calls.
        needs_special_tokens: the markup consists of special tokens, which the text must not leave out
            (``skip_special_tokens`` off).
    """

    name: str
    create: Callable[[ParserContext], OutputParser]
    needs_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningParserInfo:
    """What a plugin registers for a way to mark reasoning.

    Attributes:
        name: for ``--reasoning-parser``.
        create: makes the parser of one request, or returns None if this request does not reason. The parser gives out
            reasoning and text.
        end_token_text: what ends the reasoning; output of a given structure begins after it.
        needs_special_tokens: as in :class:`ToolParserInfo`.
    """

    name: str
    create: Callable[[ParserContext], OutputParser | None]
    end_token_text: str
    needs_special_tokens: bool = False


class ParserChain:
    """Reasoning first, tool calls in the rest. Without either parser all text is content."""

    def __init__(self, reasoning: OutputParser | None, tools: OutputParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[ParserEvent]:
        """Take the next piece of text."""
        if self._reasoning is not None:
            return self._read_calls(self._reasoning.push(text))
        return self._read_calls([TextEvent(text)] if text else [])

    def finish(self) -> list[ParserEvent]:
        """The text has ended."""
        events = [] if self._reasoning is None else self._read_calls(self._reasoning.finish())
        return events if self._tools is None else events + self._tools.finish()

    def _read_calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tools is None:
            return events
        parsed: list[ParserEvent] = []
        for event in events:
            parsed += self._tools.push(event.text) if isinstance(event, TextEvent) else [event]
        return parsed


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as a whole; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer as a whole."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


def join_events(events: Iterable[ParserEvent]) -> ParsedAnswer:
    """What all events of an answer add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for event in events:
        match event:
            case TextEvent(text):
                content.append(text)
            case ReasoningEvent(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append((event, []))
            case ToolCallArguments(index, delta):
                calls[index][1].append(delta)
    parsed = tuple(ParsedCall(start.id, start.name, "".join(deltas)) for start, deltas in calls)
    return ParsedAnswer("".join(content), "".join(reasoning), parsed)
