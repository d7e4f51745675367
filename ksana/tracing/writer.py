"""Writes trace events to a file, on a thread of its own."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from typing import Any

import orjson

from ksana.errors import UsageError

logger = logging.getLogger(__name__)

TraceEvent = dict[str, Any]
"""An event of Chrome's trace format: ``ph`` (its phase), ``ts`` (microseconds), ``pid``, ``tid``, ``name``, ..."""

MAX_WAITING_EVENTS = 200_000
"""Events in memory while the disk is slow (some 100 MiB); further ones are dropped and counted."""

_WRITE_INTERVAL_S = 0.1
_EVENTS_A_WRITE = 200
_CLOSE_TIMEOUT_S = 5.0


class TraceWriter:
    """A file that can be loaded at any moment, also after the process was killed.

    It is a JSON array with an event on each line, and grows by whole lines; only :meth:`close` adds the closing
    bracket, which viewers do not insist on. Should the disk fill up, one warning is logged, the file ends with its last
    whole line, and later events are dropped.

    Args:
        path: is replaced if it exists.
        first: written at once.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str, first: TraceEvent) -> None:
        self.path = path
        self._events: deque[TraceEvent] = deque()
        self._num_dropped = 0
        self._failed = False
        self._closing = threading.Event()
        self._size = 0
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: PTH123, SIM115 - open until close
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            self._append(b"[\n" + _encode(first))
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from None
        self._thread = threading.Thread(target=self._run, name="ksana-trace", daemon=True)
        self._thread.start()

    def emit(self, event: TraceEvent) -> None:
        """Write ``event`` soon. Never blocks, may be called from any thread; nobody may change the event any more."""
        if len(self._events) < MAX_WAITING_EVENTS and not self._failed:
            self._events.append(event)
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the array."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._num_dropped:
            logger.warning("trace %s: %d events were dropped", self.path, self._num_dropped)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_WRITE_INTERVAL_S):
                self._write_waiting()
            self._write_waiting()
            self._append(b"\n]\n")
        except OSError as error:
            self._fail(error)
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        events = self._events
        while count := min(len(events), _EVENTS_A_WRITE):
            lines = [_encode(events.popleft()) for _ in itertools.repeat(None, count)]
            try:
                self._append(b",\n" + b",\n".join(lines))
            except OSError:
                self._num_dropped += count
                raise

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._size += len(data)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        self._num_dropped += len(self._events)
        self._events.clear()
        logger.warning("trace %s: %s; tracing ends here", self.path, error.strerror or error)
        try:
            self._file.truncate(self._size)
        except OSError:
            logger.debug("trace %s ends in the middle of a line", self.path)


def _unwritable(path: str, error: OSError) -> UsageError:
    return UsageError(f"--trace {path}: cannot be written: {error.strerror or error}")


def _encode(event: TraceEvent) -> bytes:
    try:
        return orjson.dumps(event)
    except orjson.JSONEncodeError:  # half of a surrogate pair, in a request id that a client has chosen
        return json.dumps(event, separators=(",", ":")).encode()
