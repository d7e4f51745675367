"""Pushes metrics, and a span for each request, to a collector."""

from __future__ import annotations

import sys
import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from ksana.errors import UsageError
from ksana.markers import hookimpl
from ksana.telemetry.http_counts import http_counts_of
from ksana.telemetry.otlp.metrics_push import MetricsPush
from ksana.telemetry.otlp.request_spans import RequestSpans
from ksana.telemetry.source import MetricsSource

if TYPE_CHECKING:
    from aiohttp import web

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import TelemetryConfig
    from ksana.types.output import FinishReason, RequestStats

DEBUG = "debug"
"""The endpoint that prints instead."""


class OtlpExport:
    """A plugin for one engine, registered when it has started.

    Args:
        config: with an endpoint.
    """

    def __init__(self, engine: AsyncEngine, config: TelemetryConfig) -> None:
        self._source = MetricsSource(engine)
        self._timeout_s = config.otlp_timeout_s
        resource = _resource(config)
        metric_exporter, span_exporter = _exporters(config)
        self._push = MetricsPush(
            self._source,
            metric_exporter,
            resource,
            interval_s=config.otlp_interval_s,
            endpoint=config.otlp_endpoint,
        )
        self._spans = RequestSpans(span_exporter, resource, engine.served_model_name)

    @hookimpl
    def ksana_register_routes(self, app: web.Application) -> None:
        """From now on, push the server's counts too."""
        self._source.http = http_counts_of(app)

    @hookimpl
    def ksana_request_finished(
        self, request_id: str, finish_reason: FinishReason, stats: RequestStats, trace_context: str
    ) -> None:
        """Export a span."""
        self._spans.export(request_id, finish_reason, stats, trace_context)

    @hookimpl
    def ksana_engine_stopping(self) -> None:
        """Push what is left, for as long as one push may take: a dead collector must not hold up a stop."""
        closers = [threading.Thread(target=part.close, daemon=True) for part in (self._push, self._spans)]
        deadline = time.monotonic() + self._timeout_s
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.0, deadline - time.monotonic()))


def check_config(config: TelemetryConfig) -> None:
    """Raise UsageError if metrics could not be pushed as ``config`` says."""
    for word in config.otlp_attributes:
        if not all(_attribute(word)):
            raise UsageError(f"--otlp-attribute {word!r} is not valid: it must be like NAME=VALUE")
    url = config.otlp_endpoint
    if url == DEBUG:
        return
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"--otlp-endpoint {url!r} is no URL: it must be like http://collector:4318, or {DEBUG}")


def _exporters(config: TelemetryConfig) -> tuple[MetricExporter, SpanExporter]:
    if config.otlp_endpoint == DEBUG:
        return ConsoleMetricExporter(out=sys.stdout), ConsoleSpanExporter(out=sys.stdout)
    base, timeout = config.otlp_endpoint.rstrip("/"), config.otlp_timeout_s
    return (
        OTLPMetricExporter(f"{base}/v1/metrics", timeout=timeout),
        OTLPSpanExporter(f"{base}/v1/traces", timeout=timeout),
    )


def _resource(config: TelemetryConfig) -> Resource:
    own = {"service.name": "ksana", "service.version": metadata.version("ksana")}
    return Resource.create({**own, **dict(_attribute(word) for word in config.otlp_attributes)})


def _attribute(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name.strip(), value.strip()
