"""Text that arrives in pieces, for parsers written as generators."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")

Scan = Generator[None, None, _T]
"""A step of a parser: it yields when it needs more text, and returns what it has read."""

Write = Callable[[str], object]
"""Takes a piece of text."""

_SPACE = re.compile(r"\s+")


class Tags:
    """Literal strings to look for, none of which may be part of another."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        # Without any tag: a pattern that matches nowhere.
        self.pattern = re.compile("|".join(map(re.escape, tags)) or r"(?!)")

    def partial(self, text: str, start: int) -> int:
        """Length of the longest end of ``text[start:]`` that may become a tag."""
        return max((_overlap(text, start, tag) for tag in self._tags), default=0)


def _overlap(text: str, start: int, tag: str) -> int:
    at = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) - at if at >= 0 else 0


class Source:
    """Unread text, and a record of what was read and may turn out to be no markup.

    Methods that return a :data:`Scan` are to be called with ``yield from``. What they return does not depend on where
    the text was cut: they wait while more text could change it. None waits once the source is closed.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append ``text``."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """There will be no more text."""
        self._closed = True

    def start_record(self, text: str) -> None:
        """Keep what is read from now on, after ``text``, which just was."""
        self._record = [text]

    def forget(self) -> None:
        """What was read so far has been understood: drop it from the record."""
        if self._record is not None:
            self._record.clear()

    def stop_record(self) -> str:
        """Everything that was read since the last :meth:`forget`."""
        record, self._record = self._record or [], None
        return "".join(record)

    def peek(self) -> Scan[str]:
        """The next character, unread; empty at the end."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def accept(self, *literals: str) -> Scan[str]:
        """Read the first of ``literals`` that comes next, and return it; empty if none does."""
        for literal in literals:
            while not self._closed and self._may_become(literal):
                yield
            if self._text.startswith(literal, self._at):
                return self._take(self._at + len(literal))
        return ""

    def run(self, characters: re.Pattern[str]) -> Scan[str]:
        """Read as many characters as ``characters`` matches: a repeated class like ``[a-z]+``; maybe none."""
        pieces: list[str] = []
        while (yield from self.peek()):
            piece = self.available_run(characters)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def available_run(self, characters: re.Pattern[str]) -> str:
        """The part of :meth:`run` that is there already."""
        match = characters.match(self._text, self._at)
        return self._take(match.end()) if match else ""

    def space(self) -> Scan[str]:
        """Read whitespace, if there is any."""
        return (yield from self.run(_SPACE))

    def copy_character(self, write: Write) -> Scan[None]:
        """Hand the next character to ``write``, if there is one."""
        if (yield from self.peek()):
            write(self._take(self._at + 1))

    def copy_until(self, tags: Tags, write: Write) -> Scan[str]:
        """Hand text to ``write`` as it comes, up to one of ``tags``, which is read and returned; empty at the end."""
        while True:
            match = tags.pattern.search(self._text, self._at)
            if match:
                write(self._take(match.start()))
                return self._take(match.end())
            held = 0 if self._closed else tags.partial(self._text, self._at)
            write(self._take(len(self._text) - held))
            if self._closed:
                return ""
            yield

    def _may_become(self, literal: str) -> bool:
        unread = self._text[self._at : self._at + len(literal)]
        return len(unread) < len(literal) and literal.startswith(unread)

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(piece)
        return piece
