"""Where the metrics come from: an engine, and the HTTP server before it if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from ksana.telemetry.metrics import Metric, engine_metrics

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine
    from ksana.telemetry.http_counts import HttpCounts


class MetricsSource:
    """Makes all metrics anew for each call, on any thread.

    Attributes:
        http: the server's counts; None while there is no server.
    """

    def __init__(self, engine: AsyncEngine, http: HttpCounts | None = None) -> None:
        self._engine = engine
        self._version = metadata.version("ksana")
        self.http = http

    def __call__(self) -> Iterator[Metric]:
        """The metrics now."""
        snapshot = self._engine.snapshot()
        yield from engine_metrics(snapshot, model=self._engine.served_model_name, version=self._version)
        if self.http is not None:
            yield self.http.metric()
