"""What a parser has found, as events: adjacent pieces joined, calls numbered, whitespace beside markup dropped."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from ksana.text.parsing import ParserEvent, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart


def new_call_id() -> str:
    """An id in the style of OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Emitter:
    """Collects the events of one answer.

    Whitespace directly before or after markup belongs to the markup: the line breaks that a template puts around its
    tags are no part of the text. So trailing whitespace waits for what comes next. Text without markup is untouched.

    Args:
        new_id: makes the id of a call to which the model gives none.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._ids: set[str] = set()
        self._events: list[ParserEvent] = []
        self._make: Callable[[str], ParserEvent] = TextEvent
        self._pieces: list[str] = []
        self._space: list[str] = []
        self._beside_markup = False

    @property
    def num_calls(self) -> int:
        """Calls that have been started."""
        return len(self._ids)

    def text(self, piece: str) -> None:
        """A piece of content."""
        self._prose(TextEvent, piece)

    def reasoning(self, piece: str) -> None:
        """A piece of reasoning."""
        self._prose(ReasoningEvent, piece)

    def markup(self) -> None:
        """Markup was here."""
        self._space.clear()
        self._beside_markup = True

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call begins. An id that is empty, or that another call of the answer has, is replaced."""
        self.markup()
        self._flush()
        index = self.num_calls
        unique = call_id if call_id and call_id not in self._ids else self._new_id()
        self._ids.add(unique)
        self._events.append(ToolCallStart(index, unique, name))
        self._make = lambda delta: ToolCallArguments(index, delta)

    def arguments(self, piece: str) -> None:
        """A piece of the arguments of the call that was started last; no text may have come since."""
        self._pieces.append(piece)

    def end(self) -> None:
        """The answer has ended."""
        self._pieces += self._space
        self._space.clear()

    def drain(self) -> list[ParserEvent]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _prose(self, make: Callable[[str], ParserEvent], piece: str) -> None:
        if self._beside_markup:
            piece = piece.lstrip()
        body = piece.rstrip()
        if body:
            self._beside_markup = False
            if make is not self._make:
                self._flush()
                self._make = make
            self._pieces += [*self._space, body]
            self._space.clear()
        if len(body) < len(piece):
            self._space.append(piece[len(body) :])

    def _flush(self) -> None:
        joined = "".join(self._pieces)
        self._pieces.clear()
        if joined:
            self._events.append(self._make(joined))
