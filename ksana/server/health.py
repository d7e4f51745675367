"""Two questions of those who watch over the server: does it live, and should it get work?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from ksana.server.json_response import json_response
from ksana.server.lifecycle import Lifecycle
from ksana.server.operations import describes

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine


def add_health_routes(app: web.Application, engine: AsyncEngine, lifecycle: Lifecycle) -> None:
    """Add ``GET /health`` (503 asks for a restart) and ``GET /ready`` (503 asks for no more work)."""

    @describes("Does the engine live? 503 asks for a restart")
    async def health(request: web.Request) -> web.Response:
        alive = engine.is_alive
        return json_response({"status": "healthy" if alive else "unhealthy"}, status=200 if alive else 503)

    @describes("Should the server get work? 503 asks for no more")
    async def ready(request: web.Request) -> web.Response:
        if not lifecycle.accepts_work:
            return json_response({"status": lifecycle.phase.name.lower()}, status=503)
        if not engine.is_alive:
            return json_response({"status": "unhealthy"}, status=503)
        return json_response({"status": "ready"})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
