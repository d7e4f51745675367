"""``GET /v1/models`` and which names a request may use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.json_response import json_response
from ksana.server.operations import describes

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

GENERIC_NAME = "ksana-llm"
"""A name that every server answers to, as the original engine did."""


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Refuse a request for a model that this server does not have; none named means the one there is.

    Raises:
        RequestError: 404 ``model_not_found``.
    """
    known = (engine.served_model_name, engine.model_config.name, GENERIC_NAME)
    if name is not None and name not in known:
        raise RequestError(
            f"the model {name!r} does not exist; this server has {engine.served_model_name!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


class Models:
    """Serves the list of models, which has one entry."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    @describes("The models that are served")
    async def list(self, request: web.Request) -> web.Response:
        """All models."""
        return json_response({"object": "list", "data": [self._card(self._engine.served_model_name)]})

    @describes("One model, by any of its names")
    async def get(self, request: web.Request) -> web.Response:
        """One model by any of its names."""
        name = request.match_info["model_id"]
        check_model(self._engine, name)
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ksana",
            "root": self._engine.model_config.name,
            "max_model_len": self._engine.max_model_len,
        }
