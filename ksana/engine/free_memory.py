"""Memory that was needed only to load."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Give the heap's free pages back to the system, where the C library can: glibc keeps those between used ones."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return
    trim(0)
