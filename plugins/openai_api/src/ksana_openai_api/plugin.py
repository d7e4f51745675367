"""What Ksana finds through the entry point: the routes, and nothing loaded before they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from aiohttp import web

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import KsanaConfig

ksana_api = 1


@hookimpl
def ksana_register_routes(app: web.Application, engine: AsyncEngine, config: KsanaConfig) -> None:
    """Add the routes of the OpenAI API."""
    from ksana_openai_api.chat import ChatCompletions
    from ksana_openai_api.completions import Completions
    from ksana_openai_api.models import Models

    app.router.add_post("/v1/chat/completions", ChatCompletions(engine).handle)
    app.router.add_post("/v1/completions", Completions(engine).handle)
    models = Models(engine)
    for prefix in ("/v1", ""):
        app.router.add_get(f"{prefix}/models", models.list)
        # A hub name has a slash in it.
        app.router.add_get(f"{prefix}/models/{{model_id:.+}}", models.get)
