"""``POST /reset_prefix_cache``."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, Field

from ksana.engine.async_engine import AsyncEngine
from ksana.server.json_response import json_response
from ksana.server.operations import describes


class ResetResponse(BaseModel):
    """What was forgotten."""

    num_blocks: int = Field(description="blocks of the KV cache whose content could be found")


class PrefixCacheHandler:
    """Lets operators and tests begin with an empty cache."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @describes("Forget all cached prefixes, those beyond the device included", response=ResetResponse)
    async def reset(self, request: web.Request) -> web.Response:
        """Running requests are not disturbed."""
        return json_response(ResetResponse(num_blocks=await self._engine.reset_prefix_cache()))
