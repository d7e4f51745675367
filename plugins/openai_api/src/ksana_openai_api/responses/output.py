"""The output of a response: what a parser has found, sorted into items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ksana.text.parsing import ParserEvent, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from ksana_openai_api.responses.conversation import Item
from ksana_openai_api.responses.items import CallItem, Event, ItemStatus, MessageItem, OutputItem, ReasoningItem

_TextItemT = TypeVar("_TextItemT", MessageItem, ReasoningItem)


class ResponseOutput:
    """The items of one response. An item ends where the next one begins."""

    def __init__(self) -> None:
        self._items: list[OutputItem] = []
        self._logprobs: list[Any] = []

    def read(self, found: Sequence[ParserEvent], logprobs: Sequence[Any]) -> list[Event]:
        """Take what a parser has found, and the log probabilities of the tokens that it was found in.

        Those go with the next text. They are dropped where there was nothing but reasoning or a call.
        """
        self._logprobs += logprobs
        told = [event for each in found for event in self._read_one(each)]
        if self._last is not None and not isinstance(self._last, MessageItem):
            self._logprobs.clear()
        return told

    def end(self, status: ItemStatus) -> list[Event]:
        """The answer has ended. One without anything in it is an empty message."""
        told = self._begin(MessageItem(0)) if self._last is None else []
        if isinstance(self._last, MessageItem):
            self._last.add_logprobs(self._take_logprobs())
        assert self._last is not None
        return [*told, *self._last.end(status)]

    def as_json(self) -> list[Item]:
        """The items so far."""
        return [item.as_json() for item in self._items]

    @property
    def _last(self) -> OutputItem | None:
        return self._items[-1] if self._items else None

    def _read_one(self, found: ParserEvent) -> list[Event]:
        match found:
            case TextEvent(text):
                message, begun = self._text_item(MessageItem)
                return [*begun, message.say(text, self._take_logprobs())]
            case ReasoningEvent(text):
                reasoning, begun = self._text_item(ReasoningItem)
                return [*begun, reasoning.append(text)]
            case ToolCallStart():
                return self._begin(CallItem(len(self._items), found))
            case ToolCallArguments(_, delta):
                assert isinstance(self._last, CallItem), "arguments must follow the start of their call"
                return [self._last.append(delta)]

    def _text_item(self, kind: type[_TextItemT]) -> tuple[_TextItemT, list[Event]]:
        """The item to which text is added, and the events of its beginning if it is new."""
        if isinstance(self._last, kind):
            return self._last, []
        item = kind(len(self._items))
        return item, self._begin(item)

    def _begin(self, item: OutputItem) -> list[Event]:
        ended = [] if self._last is None else self._last.end("completed")
        self._items.append(item)
        return [*ended, *item.begin()]

    def _take_logprobs(self) -> list[Any]:
        taken, self._logprobs = self._logprobs, []
        return taken
