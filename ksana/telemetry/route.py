"""``GET /metrics``."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING

from aiohttp import web

from ksana.server.operations import describes
from ksana.telemetry.source import MetricsSource

if TYPE_CHECKING:
    from ksana.telemetry.prometheus import Exposition


class MetricsHandler:
    """Serves ``source`` to Prometheus."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    @describes("Metrics in the text format of Prometheus", media_type="text/plain")
    async def get(self, request: web.Request) -> web.Response:
        """Answer in the text format of Prometheus, or in OpenMetrics if the client asks for it."""
        # On a thread: the first call imports the client library, which takes 50 ms.
        body, content_type = await asyncio.to_thread(self._write, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    @cached_property
    def _exposition(self) -> Exposition:
        from ksana.telemetry.prometheus import Exposition

        return Exposition(self._source)

    def _write(self, accept: str) -> tuple[bytes, str]:
        return self._exposition.write(accept)
