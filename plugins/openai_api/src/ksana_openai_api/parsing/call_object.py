"""Calls written as JSON objects: ``{"name": "f", "arguments": {...}}``."""

from __future__ import annotations

from ksana_openai_api.parsing.emitter import Emitter
from ksana_openai_api.parsing.json_value import copy_value, decode_string, read_string
from ksana_openai_api.parsing.source import Scan, Source

_ARGUMENTS = ("arguments", "parameters")
_KNOWN_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})

NO_ARGUMENTS = "{}"


class _CallObject:
    """What is known of a call while its object is read. The keys come in any order."""

    def __init__(self, source: Source, out: Emitter) -> None:
        self._source = source
        self._out = out
        self.name: str | None = None
        self.arguments: str | None = None
        self.started = False

    def start(self) -> None:
        self._out.start_call(self.name or "")
        self._source.forget()
        self.started = True

    def read_member(self, key: str) -> Scan[bool]:
        """Read the value of ``key``. False if it cannot be read."""
        if key == "name" and self.name is None:
            self.name = yield from read_string(self._source)
            return bool(self.name)
        if key in _ARGUMENTS and not self.started and self.arguments is None:
            return (yield from self._read_arguments())
        return (yield from copy_value(self._source, lambda _: None))

    def _read_arguments(self) -> Scan[bool]:
        if self.name is not None and (yield from self._source.peek()) in ("{", "["):
            self.start()
            complete = yield from copy_value(self._source, self._out.arguments)
            self._source.forget()
            return complete
        pieces: list[str] = []
        complete = yield from copy_value(self._source, pieces.append)
        self.arguments = _plain_arguments("".join(pieces))
        return complete

    def end(self) -> None:
        """The object is complete and has a name: say what was held back."""
        if not self.started:
            self.start()
            self._out.arguments(self.arguments or NO_ARGUMENTS)
        self._source.forget()


def read_call_object(source: Source, out: Emitter, strict: bool = False) -> Scan[bool]:
    """Read a call. Arguments are given out as they come, if the name has come before.

    Args:
        strict: the object stands where an ordinary answer in JSON might, so it is a call only if it has arguments and
            no key that calls do not have.

    Returns:
        True if it was a call from its first character to its last. If not, the source's record has what did not become
        part of one.
    """
    if not (yield from source.accept("{")):
        return False
    call = _CallObject(source, out)
    while True:
        yield from source.space()
        if (yield from source.accept("}")):
            break
        key = yield from _read_key(source)
        if key is None or (strict and key not in _KNOWN_KEYS) or not (yield from call.read_member(key)):
            return False
        yield from source.space()
        yield from source.accept(",")
    if call.name is None or (strict and not call.started and call.arguments is None):
        return False
    call.end()
    return True


def _read_key(source: Source) -> Scan[str | None]:
    key = yield from read_string(source)
    yield from source.space()
    if not (yield from source.accept(":")):
        return None
    yield from source.space()
    return key


def _plain_arguments(value: str) -> str:
    """Some models write the arguments as a string that holds JSON, or null where there are none."""
    decoded = decode_string(value) if value.startswith('"') else None
    plain = value if decoded is None else decoded
    return NO_ARGUMENTS if plain.strip() in ("", "null") else plain
