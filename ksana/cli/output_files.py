"""The files that commands write their results to."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ksana.errors import UsageError


def check_writable(path: Path) -> None:
    """Find out before hours of work that their result could not be written.

    Raises:
        UsageError: the folder of ``path`` is not there or not writable, or ``path`` is itself a folder.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if _is_special(path):
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: no permission to write in {folder}")


def check_can_plot() -> None:
    """Raise UsageError if matplotlib is not installed: it is an extra."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it with: pip install matplotlib")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, which then takes its place: it appears whole or not at all.

    Devices and pipes are written to directly.

    Raises:
        UsageError: it cannot be written, as :func:`check_writable` says or because the file system refuses it.
    """
    check_writable(path)
    target = path.resolve()
    part = path if _is_special(path) else target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        write(part)
        if part is not path:
            part.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if part is not path:
            part.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
