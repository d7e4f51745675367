"""Calls between tags, in an answer that may have text before, between and after them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from ksana.text.parsing import OutputParser, ParserContext, ToolParserInfo
from ksana_openai_api.parsing.call_object import NO_ARGUMENTS
from ksana_openai_api.parsing.emitter import Emitter, new_call_id
from ksana_openai_api.parsing.json_value import copy_value
from ksana_openai_api.parsing.scan_parser import ScanParser
from ksana_openai_api.parsing.source import Scan, Source, Tags


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    Attributes:
        name: for ``--tool-call-parser``.
        read: reads what follows an opening tag. What it reads and does not understand stays in the source's record,
            and becomes content.
        openers: tags that begin a call or a list of calls.
        closers: tags that end one. After a call they are dropped wherever they are, before one they are content.
        at_start: a call may also begin the answer, without a tag.
        needs_special_tokens: the tags are special tokens.
        new_id: makes ids of calls.
    """

    name: str
    read: Callable[[Source, Emitter], Generator[None, None, object]]
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    at_start: bool = False
    needs_special_tokens: bool = False
    new_id: Callable[[], str] = new_call_id

    def create(self, context: ParserContext) -> OutputParser:
        """A parser for one request."""
        return ScanParser(self._scan, self.new_id)

    def info(self) -> ToolParserInfo:
        """What to register."""
        return ToolParserInfo(self.name, self.create, self.needs_special_tokens)

    def _scan(self, source: Source, out: Emitter) -> Scan[None]:
        if self.at_start:
            yield from self._read_calls(source, out, "")
        before_calls, after_a_call = Tags(*self.openers), Tags(*self.openers, *self.closers)
        while tag := (yield from source.copy_until(after_a_call if out.num_calls else before_calls, out.text)):
            if tag in self.closers:
                out.markup()
            else:
                yield from self._read_calls(source, out, tag)

    def _read_calls(self, source: Source, out: Emitter, opener: str) -> Scan[None]:
        source.start_record(opener)
        yield from self.read(source, out)
        out.text(source.stop_record())


def read_arguments(source: Source, out: Emitter, name: str, closers: tuple[str, ...], call_id: str = "") -> Scan[bool]:
    """Read the arguments of a call whose name has been read, as JSON; none at all if one of ``closers`` comes.

    Returns:
        False if there is neither: then it is no call.
    """
    yield from source.space()
    if (yield from source.peek()) == "{":
        out.start_call(name, call_id)
        yield from copy_value(source, out.arguments)
    elif (yield from source.accept(*closers)):
        out.start_call(name, call_id)
        out.arguments(NO_ARGUMENTS)
    else:
        return False
    source.forget()
    return True
