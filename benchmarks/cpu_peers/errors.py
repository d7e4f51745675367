"""What may go wrong with an engine without ending the comparison."""

from __future__ import annotations


class EngineFailed(Exception):  # noqa: N818 - it is reported as a state of the engine
    """An engine cannot be installed, does not start, fails, or takes too long; the text says which."""
