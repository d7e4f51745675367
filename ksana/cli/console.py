"""What commands report beside the files that they write."""

from __future__ import annotations

import errno
import os
from typing import Any

from rich.console import Console

from ksana.stdout import as_long_as_stdout_takes_it


class StdoutConsole(Console):
    """rich's console on stdout, which nobody needs to read: see :mod:`ksana.stdout`."""

    def print(self, *objects: Any, **options: Any) -> None:
        with as_long_as_stdout_takes_it():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        # Called while it prints, and would end the process.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
