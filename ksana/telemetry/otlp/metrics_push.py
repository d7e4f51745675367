"""Metrics on their way to an OpenTelemetry collector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as OtlpHistogram
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ksana.telemetry.metrics import Metric
from ksana.telemetry.otlp.sdk_log import quiet_sdk_log
from ksana.types.stats import Histogram

logger = logging.getLogger(__name__)

_CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsPush:
    """Pushes all metrics every ``interval_s`` seconds, on a thread of its own.

    The counts are the engine's, and not instruments of the SDK: those would want a call for each token.

    Args:
        source: the metrics, asked anew for every push.
        exporter: sends them. Its failure is logged once until it works again.
        endpoint: where to, for the log.
    """

    def __init__(
        self,
        source: Callable[[], Iterable[Metric]],
        exporter: MetricExporter,
        resource: Resource,
        *,
        interval_s: float,
        endpoint: str,
    ) -> None:
        self._endpoint = endpoint
        self._source = source
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._started_ns = time.time_ns()
        self._works = True
        self._sdk_log = quiet_sdk_log()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ksana-otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push a last time if that worked before; blocks meanwhile."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._push()
        if self._works:
            self._push()
        self._exporter.shutdown()

    def _push(self) -> None:
        self._sdk_log.first = ""
        try:
            worked = self._exporter.export(self._encode()) is MetricExportResult.SUCCESS
        except Exception:
            logger.debug("cannot push metrics", exc_info=True)
            worked = False
        if worked and not self._works:
            logger.warning("Metrics are pushed again")
        elif self._works and not worked:
            logger.warning("Cannot push metrics to %s: %s", self._endpoint, self._sdk_log.first)
        self._works = worked

    def _encode(self) -> MetricsData:
        now = time.time_ns()
        metrics = [self._encode_metric(metric, now) for metric in self._source() if metric.values]
        scope = ScopeMetrics(InstrumentationScope("ksana"), metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])

    def _encode_metric(self, metric: Metric, now: int) -> OtlpMetric:
        unit = "s" if metric.name.endswith("_seconds") else "1"
        histograms: list[HistogramDataPoint] = []
        numbers: list[NumberDataPoint] = []
        for labels, value in metric.values:
            if isinstance(value, Histogram):
                histograms.append(self._histogram_point(dict(labels), value, now))
            else:
                numbers.append(NumberDataPoint(dict(labels), self._started_ns, now, value))
        data: Sum | Gauge | OtlpHistogram
        if metric.kind == "histogram":
            data = OtlpHistogram(histograms, _CUMULATIVE)
        elif metric.kind == "counter":
            data = Sum(numbers, _CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(numbers)
        return OtlpMetric(metric.name, metric.help, unit, data)

    def _histogram_point(self, labels: dict[str, str], value: Histogram, now: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            labels,
            self._started_ns,
            now,
            count=value.count,
            sum=value.sum,
            bucket_counts=value.counts,
            explicit_bounds=value.bounds,
            min=None,  # type: ignore[arg-type]  # optional in the protocol, and of no use over a server's whole life
            max=None,  # type: ignore[arg-type]
        )
