"""One answer of a chat completion, while it is generated and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ksana.text.parsing import OutputParser, ParserEvent, ReasoningEvent, TextEvent, ToolCallArguments, ToolCallStart
from ksana.types.output import FinishReason, RequestOutput
from ksana_openai_api.answers import finish_of


@dataclass(slots=True)
class ToolCall:
    """A call of a function, its arguments as the model wrote them."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As an entry of ``tool_calls``."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ChoiceReader:
    """Reads the outputs of one request, and keeps what they add up to.

    Args:
        parser: of this answer; None if all text is content.
        parallel_calls: give out more than one tool call.
    """

    def __init__(self, parser: OutputParser | None, *, parallel_calls: bool = True) -> None:
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return self._parser is None

    def read(self, output: RequestOutput) -> list[ParserEvent]:
        """What is new in ``output``."""
        if self._parser is None:
            events: list[ParserEvent] = [TextEvent(output.text_delta)] if output.text_delta else []
        else:
            events = self._parser.push(output.text_delta) if output.text_delta else []
            if output.finished:
                events += self._parser.finish()
        wanted = [event for event in events if self._is_wanted(event)]
        for event in wanted:
            self._keep(event)
        return wanted

    def read_whole(self, output: RequestOutput) -> None:
        """Read the last output of a request of which no other was read."""
        self.read(RequestOutput(output.request_id, [], text_delta=output.text, finish_reason=output.finish_reason))

    def finish_reason(self, output: RequestOutput) -> str | None:
        """Why the answer ended, if it has."""
        if output.finish_reason is FinishReason.STOP and self.calls:
            return "tool_calls"
        return finish_of(output.finish_reason)

    @property
    def content(self) -> str | None:
        """The content; None if there are calls and nothing beside them."""
        text = "".join(self._content)
        return None if self.calls and not text else text

    @property
    def reasoning(self) -> str | None:
        """What the model thought, if it did so aloud."""
        return "".join(self._reasoning) if self._reasoning else None

    def message(self) -> dict[str, Any]:
        """The whole message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return message

    def _is_wanted(self, event: ParserEvent) -> bool:
        return self._parallel_calls or not isinstance(event, (ToolCallStart, ToolCallArguments)) or event.index == 0

    def _keep(self, event: ParserEvent) -> None:
        match event:
            case TextEvent(text):
                self._content.append(text)
            case ReasoningEvent(text):
                self._reasoning.append(text)
            case ToolCallStart(_, call_id, name):
                self.calls.append(ToolCall(call_id, name))
            case ToolCallArguments(index, delta):
                self.calls[index].arguments.append(delta)


def event_delta(event: ParserEvent) -> dict[str, Any]:
    """The ``delta`` of a streamed chunk for one event."""
    match event:
        case TextEvent(text):
            return {"content": text}
        case ReasoningEvent(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, delta):
            return {"tool_calls": [{"index": index, "function": {"arguments": delta}}]}
