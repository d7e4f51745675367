"""A format, written as a generator, as the parser of one request."""

from __future__ import annotations

from collections.abc import Callable

from ksana.text.parsing import ParserEvent
from ksana_openai_api.parsing.emitter import Emitter, new_call_id
from ksana_openai_api.parsing.source import Scan, Source


class ScanParser:
    """Runs ``scan`` on text that is pushed; it must not return before the source's end.

    Args:
        scan: reads all of the source and tells the emitter what it finds.
        new_id: makes ids of calls.
    """

    def __init__(self, scan: Callable[[Source, Emitter], Scan[None]], new_id: Callable[[], str] = new_call_id) -> None:
        self._source = Source()
        self._out = Emitter(new_id)
        self._steps = scan(self._source, self._out)

    def push(self, text: str) -> list[ParserEvent]:
        """Take the next piece of text."""
        self._source.feed(text)
        next(self._steps, None)
        return self._out.drain()

    def finish(self) -> list[ParserEvent]:
        """The text has ended."""
        self._source.close()
        next(self._steps, None)
        self._out.end()
        return self._out.drain()
