"""Counts the server's answers by route and status."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from ksana.telemetry.metrics import Metric

_UNMATCHED = "none"
"""The route of a request for a path that does not exist: clients may invent any number of those."""


class HttpCounts:
    """Counts every answer of an application when its headers leave. A client that left before has none."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    async def count(self, request: web.Request, response: web.StreamResponse) -> None:
        """For ``on_response_prepare``."""
        route = request.match_info.route
        path = _UNMATCHED if route.resource is None else route.resource.canonical
        self._counts[route.method, path, response.status] += 1

    def metric(self) -> Metric:
        """The counts up to now. Safe on any thread."""
        values = [
            ({"method": method, "route": path, "status": str(status)}, float(count))
            for (method, path, status), count in self._counts.copy().items()
        ]
        return Metric("ksana_http_requests", "counter", "HTTP requests answered.", [*values])


_HTTP_COUNTS: web.AppKey[HttpCounts] = web.AppKey("ksana_http_counts", HttpCounts)


def http_counts_of(app: web.Application) -> HttpCounts:
    """The counts of ``app``, which begin with the first call."""
    if _HTTP_COUNTS not in app:
        app[_HTTP_COUNTS] = counts = HttpCounts()
        app.on_response_prepare.append(counts.count)
    return app[_HTTP_COUNTS]
