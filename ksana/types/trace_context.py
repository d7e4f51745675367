"""Which distributed trace the code at hand works for, as a W3C ``traceparent``."""

from __future__ import annotations

import re
from contextvars import ContextVar

current_trace_context: ContextVar[str] = ContextVar("ksana_trace_context", default="")
"""The ``traceparent`` of the HTTP request that is being handled; empty outside of one, or if it has none."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def valid_traceparent(header: str) -> str:
    """Return ``header`` if it is a ``traceparent``, else an empty string: W3C says to ignore a malformed one.

    A version after 00 may have more fields, which are cut off.
    """
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return ""
    version, trace_id, span_id, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return ""
    return header.strip()[:55]
