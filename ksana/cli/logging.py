"""Logging of the commands: one format, to stderr, so that stdout stays free for results."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_MAX_QUEUED_LINES = 10_000
_FLUSH_TIMEOUT_S = 1.0


class QueuedStreamHandler(logging.Handler):
    """Writes lines on a thread of its own: a log that nobody reads must not stop those who write to it.

    Once ``_MAX_QUEUED_LINES`` lines wait, further ones are dropped; how many is said as soon as writing goes on.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(_MAX_QUEUED_LINES)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="ksana-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1

    def flush(self) -> None:
        """Wait until all is written, but not longer than a second."""
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._num_dropped = self._num_dropped, 0
            notice = f"({dropped} log lines were dropped, because nobody read them)\n" if dropped else ""
            with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream closed
                self._stream.write(f"{line}\n{notice}")
                self._stream.flush()
            self._lines.task_done()


def setup_logging(level: str) -> None:
    """Send Ksana's and its plugins' records of ``level`` (``debug`` to ``error``) and above to stderr.

    Other libraries are heard from ``warning`` on, except at ``debug``. May be called again to change the level.
    """
    root = logging.getLogger()
    if not root.handlers and sys.stderr is not None:
        handler = QueuedStreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    chosen = getattr(logging, level.upper())
    root.setLevel(logging.DEBUG if chosen == logging.DEBUG else max(chosen, logging.WARNING))
    logging.getLogger("ksana").setLevel(chosen)


def flush_logging() -> None:
    """Wait, for a moment, until what has been logged is written: before something else goes to stderr."""
    for handler in logging.getLogger().handlers:
        handler.flush()
