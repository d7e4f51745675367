"""Hooks for those who measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from ksana.types.output import FinishReason, RequestStats


@hookspec
def ksana_request_finished(
    request_id: str, finish_reason: FinishReason, stats: RequestStats, trace_context: str
) -> None:
    """A request has ended, for whatever reason.

    When: once per admitted request, on the engine's thread: return quickly. Not called for requests that a stopping
    engine leaves unended. Not firstresult. Times in ``stats`` are seconds of ``time.monotonic``.
    ``trace_context`` is the ``traceparent`` (W3C) that the request came with, or empty. An exception is logged and
    ignored.

    Example::

        @hookimpl
        def ksana_request_finished(request_id, finish_reason, stats):
            my_histogram.observe(stats.finished_time - stats.arrival_time)
    """
