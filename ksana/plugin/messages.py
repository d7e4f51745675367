"""Words for error messages about plugins and names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def describe_plugin(name: str | None, distribution: str | None = None) -> str:
    """Name a plugin in a message: ``plugin 'cuda' (from ksana-cuda 1.2)``."""
    return f"plugin {name!r} (from {distribution})" if distribution else f"plugin {name!r}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the known word nearest to ``word``, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def describe_cause(error: BaseException) -> str:
    """Render an exception as one line, with the place in a file where it was raised."""
    if isinstance(error, SyntaxError) and error.filename:  # raised by whoever compiled the file, not in it
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    text = " ".join(str(error).split())
    frame = error.__traceback__
    place = ""
    while frame is not None:
        filename = frame.tb_frame.f_code.co_filename
        if not filename.startswith("<"):  # the import machinery
            place = f" ({filename}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
