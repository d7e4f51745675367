"""Traces in the JSON format of Chrome, which https://ui.perfetto.dev opens."""

from ksana.tracing.writer import TraceEvent, TraceWriter

__all__ = ["TraceEvent", "TraceWriter"]
