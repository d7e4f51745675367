"""Waiting in tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as a condition holds. It is the test's own timeout that ends a wait in vain, with a traceback."""
    while not condition():
        time.sleep(0.005)
