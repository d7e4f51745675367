"""Writing to stdout, which nobody may read."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def show(text: str) -> None:
    """Write ``text`` and a new line to stdout, at once, as long as it takes them."""
    with as_long_as_stdout_takes_it():
        print(text, flush=True)  # noqa: T201 - what a command shows, not a log


@contextmanager
def as_long_as_stdout_takes_it() -> Iterator[None]:
    """For a block that only writes to stdout.

    A pipe that was closed or a disk that is full is no reason not to go on: there are requests to serve, and files to
    write. One line of the log says that it happened, and what comes later goes nowhere.
    """
    try:
        yield
    except OSError as error:
        logger.warning("Cannot write to stdout: %s", error.strerror or error)
        # What is left in the buffer would fail again at exit, and change the exit code.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
