"""Logging of the commands: one format, to stderr, so that stdout stays free for results."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(level: str) -> None:
    """Send Ksana's and its plugins' records of ``level`` (``debug`` to ``error``) and above to stderr.

    Other libraries are heard from ``warning`` on, except at ``debug``. May be called again to change the level.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    chosen = getattr(logging, level.upper())
    root.setLevel(logging.DEBUG if chosen == logging.DEBUG else max(chosen, logging.WARNING))
    logging.getLogger("ksana").setLevel(chosen)
