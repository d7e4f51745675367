"""The metrics in Prometheus' text format, written by its own client library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ksana.telemetry.metrics import Metric
from ksana.types.stats import Histogram


class Exposition:
    """Writes metrics, and what the process itself uses.

    Args:
        source: the metrics, asked anew for every text.
    """

    def __init__(self, source: Callable[[], Iterable[Metric]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(source))
        ProcessCollector(registry=self._registry)

    def write(self, accept: str) -> tuple[bytes, str]:
        """Returns the text in the format that a client accepts by this header, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Collector(Collector):
    def __init__(self, source: Callable[[], Iterable[Metric]]) -> None:
        self._source = source

    def describe(self) -> list[Family]:
        """Nothing: the registry would otherwise collect once to see the names."""
        return []

    def collect(self) -> Iterator[Family]:
        return map(_family, self._source())


def _family(metric: Metric) -> Family:
    labels = list(metric.values[0][0]) if metric.values else []
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for key, value in metric.values:
            assert isinstance(value, Histogram)
            histograms.add_metric(list(key.values()), _buckets(value), value.sum)
        return histograms
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(metric.name, metric.help, labels=labels)
    for key, value in metric.values:
        assert not isinstance(value, Histogram)
        family.add_metric(list(key.values()), value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
