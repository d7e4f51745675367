"""A span of OpenTelemetry for each request of the engine."""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ksana.types.output import FinishReason, RequestStats


class RequestSpans:
    """Makes a span when a request has ended, and exports it later, on a thread of the SDK.

    What a full queue, or a collector that does not answer, leaves no room for is dropped.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource, model: str) -> None:
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ksana")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._epoch_s = time.time() - time.monotonic()

    def export(self, request_id: str, finish_reason: FinishReason, stats: RequestStats, trace_context: str) -> None:
        """Export the span of a request.

        Args:
            trace_context: the ``traceparent`` of the caller's span, which the new one continues; empty: a new trace.
        """
        span = self._tracer.start_span(
            "generate",
            context=self._propagator.extract({"traceparent": trace_context}),
            kind=SpanKind.SERVER,
            start_time=self._nanoseconds(stats.arrival_time),
            attributes={
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": request_id,
                "gen_ai.response.finish_reasons": [finish_reason.value],
                "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
                "gen_ai.usage.output_tokens": stats.num_output_tokens,
                "ksana.cached_tokens": stats.num_cached_tokens,
                "ksana.preemptions": stats.num_preemptions,
            },
        )
        for name, moment in (
            ("queue_time", stats.first_scheduled_time),
            ("time_to_first_token", stats.first_token_time),
        ):
            if moment is not None:
                span.set_attribute(f"ksana.{name}_seconds", moment - stats.arrival_time)
        if finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(None if stats.finished_time is None else self._nanoseconds(stats.finished_time))

    def close(self) -> None:
        """Export what is left; blocks meanwhile."""
        self._provider.shutdown()

    def _nanoseconds(self, moment: float) -> int:
        return int((self._epoch_s + moment) * 1e9)
