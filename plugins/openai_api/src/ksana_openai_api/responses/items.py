"""The items that an answer consists of, while they grow: each tells of itself in events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from ksana.text.parsing import ToolCallStart
from ksana_openai_api.responses.conversation import Item, is_json_object, new_id

Event = dict[str, Any]
"""An event of the stream, without its number."""

ItemStatus = Literal["completed", "incomplete"]


class OutputItem(ABC):
    """What all items have in common.

    Args:
        index: its place in the output.
        item: the item as it is announced, without ``status``.
    """

    def __init__(self, index: int, item: Item) -> None:
        self._item: Item = {**item, "status": "in_progress"}
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        """The events that announce it."""
        return [self._item_event("added", dict(self._item))]

    def end(self, status: ItemStatus) -> list[Event]:
        """Complete it; the events that tell of it as a whole."""
        self._item["status"] = status
        return [self._item_event("done", self.as_json())]

    @abstractmethod
    def as_json(self) -> Item:
        """The item so far."""

    def _item_event(self, name: str, item: Item) -> Event:
        return {"type": f"response.output_item.{name}", "output_index": self._index, "item": item}

    def _event(self, name: str, **more: Any) -> Event:
        return {"type": f"response.{name}", "item_id": self._item["id"], "output_index": self._index, **more}


class TextItem(OutputItem):
    """An item with one part of text.

    Args:
        part: the part, without its text.
    """

    def __init__(self, index: int, item: Item, part: dict[str, Any]) -> None:
        super().__init__(index, {**item, "content": []})
        self._part = part

    def begin(self) -> list[Event]:
        """The item without a part, and the part without text."""
        return [*super().begin(), self._part_event("content_part.added", part=self._part_so_far())]

    def append(self, text: str, **more: Any) -> Event:
        """A piece of text."""
        self._pieces.append(text)
        return self._part_event(f"{self._part['type']}.delta", delta=text, **more)

    def end(self, status: ItemStatus) -> list[Event]:
        """The text, the part and the item, each as a whole."""
        part = self._part_so_far()
        whole = {key: part[key] for key in ("text", "logprobs") if key in part}
        return [
            self._part_event(f"{self._part['type']}.done", **whole),
            self._part_event("content_part.done", part=part),
            *super().end(status),
        ]

    def as_json(self) -> Item:
        """The item with the text so far."""
        return {**self._item, "content": [self._part_so_far()]}

    def _part_so_far(self) -> dict[str, Any]:
        return {**self._part, "text": "".join(self._pieces)}

    def _part_event(self, name: str, **more: Any) -> Event:
        return self._event(name, content_index=0, **more)


class ReasoningItem(TextItem):
    """What the model thinks, word for word; there are no summaries."""

    def __init__(self, index: int) -> None:
        super().__init__(index, {"id": new_id("rs"), "type": "reasoning", "summary": []}, {"type": "reasoning_text"})


class MessageItem(TextItem):
    """What the model says."""

    def __init__(self, index: int) -> None:
        item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        super().__init__(index, item, {"type": "output_text", "annotations": []})
        self._logprobs: list[Any] = []

    def say(self, text: str, logprobs: Sequence[Any]) -> Event:
        """A piece of text, and the log probabilities of tokens that came with it."""
        self.add_logprobs(logprobs)
        return self.append(text, logprobs=logprobs)

    def add_logprobs(self, logprobs: Sequence[Any]) -> None:
        """Log probabilities of tokens behind all text."""
        self._logprobs += logprobs

    def _part_so_far(self) -> dict[str, Any]:
        return {**super()._part_so_far(), "logprobs": list(self._logprobs)}


class CallItem(OutputItem):
    """A call of a function."""

    def __init__(self, index: int, start: ToolCallStart) -> None:
        item = {"id": new_id("fc"), "type": "function_call", "call_id": start.id, "name": start.name, "arguments": ""}
        super().__init__(index, item)

    def append(self, delta: str) -> Event:
        """A piece of the arguments."""
        self._pieces.append(delta)
        return self._event("function_call_arguments.delta", delta=delta)

    def end(self, status: ItemStatus) -> list[Event]:
        """The arguments and the call. One whose arguments broke off is incomplete, whatever ended the answer."""
        arguments = "".join(self._pieces)
        done = self._event("function_call_arguments.done", arguments=arguments)
        return [done, *super().end(status if is_json_object(arguments) else "incomplete")]

    def as_json(self) -> Item:
        """The call with the arguments so far."""
        return {**self._item, "arguments": "".join(self._pieces)}
