"""Conformance kit for parsers of tool calls and of reasoning.

Give it your factory and texts that models write; see :class:`ksana.text.parsing.OutputParser` for what it checks::

    def test_my_parser():
        check_output_parser(lambda: MyToolParser(), ["Hello", "<call>f()</call>", "<call>f("])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ksana.text.parsing import (
    OutputParser,
    ParsedAnswer,
    ParserEvent,
    ToolCallArguments,
    ToolCallStart,
    join_events,
)


def parse_pieces(parser: OutputParser, pieces: Sequence[str]) -> ParsedAnswer:
    """Push all pieces, and check that the events make sense one after the other."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    _check_order(events)
    answer = join_events(events)
    ids = [call.id for call in answer.calls]
    assert all(ids) and len(set(ids)) == len(ids), f"ids must be unique: {ids}"
    return answer


def check_output_parser(create: Callable[[], OutputParser], texts: Iterable[str]) -> None:
    """Check that each text comes out the same whole, cut in two at any place, and one character at a time."""
    for text in texts:
        whole = _without_ids(parse_pieces(create(), [text]))
        cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
        for pieces in [*cuts, list(text), [*text, ""]]:
            found = _without_ids(parse_pieces(create(), pieces))
            assert found == whole, f"{pieces} became {found}, but as a whole {whole}"


def _check_order(events: list[ParserEvent]) -> None:
    num_calls = 0
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == num_calls, f"call {num_calls} has index {event.index}"
            num_calls += 1
        elif isinstance(event, ToolCallArguments):
            assert event.index == num_calls - 1, f"arguments of call {event.index} after call {num_calls - 1} began"
            assert event.delta, "an event without text"
        else:
            assert event.text, "an event without text"


def _without_ids(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, str]]]:
    """An answer without what a parser may draw at random."""
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]
