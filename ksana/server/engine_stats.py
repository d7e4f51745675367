"""What the engine does right now, for those who watch: ``GET /engine/stats``, and the same as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiohttp import web

from ksana.errors import EngineDeadError, RequestError
from ksana.server.json_response import json_response
from ksana.server.operations import describes
from ksana.server.streaming import SSE, JsonStream
from ksana.types.stats import StepStats

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

MAX_WATCHERS: Final = 16
"""Streams at once. Each costs a snapshot twice a second, and a connection."""

INTERVAL_S: Final = 0.5

_BEFORE_ALL_STEPS: Final = -1


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The model, and an excerpt of :class:`~ksana.types.stats.EngineSnapshot`, where the fields are explained."""

    model: str
    max_model_len: int
    has_chat_template: bool
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    recent_steps: list[StepStats]

    @classmethod
    def of(cls, engine: AsyncEngine, *, after_step: int = _BEFORE_ALL_STEPS) -> EngineFigures:
        """The figures now, of the steps only those with higher numbers than ``after_step``.

        Raises:
            EngineDeadError: there will be no more.
        """
        if not engine.is_alive:
            raise EngineDeadError("the engine has stopped")
        now = engine.snapshot()
        return cls(
            model=engine.served_model_name,
            max_model_len=engine.max_model_len,
            has_chat_template=engine.chat_template is not None,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            blocks_used=now.blocks_used,
            blocks_cached=now.blocks_cached,
            blocks_free=now.blocks_free,
            num_steps=now.num_steps,
            prompt_tokens=now.prompt_tokens,
            output_tokens=now.output_tokens,
            cached_tokens=now.cached_tokens,
            recent_steps=[step for step in now.recent_steps if step.number > after_step],
        )


class EngineStats:
    """Serves the figures of one engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._num_watchers = 0
        self._closing = asyncio.Event()

    @describes("What the engine does now, and its latest steps", response=EngineFigures)
    async def get(self, request: web.Request) -> web.Response:
        """The figures, once."""
        return json_response(EngineFigures.of(self._engine))

    @describes("The same twice a second", media_type="text/event-stream")
    async def watch(self, request: web.Request) -> web.StreamResponse:
        """The figures every :data:`INTERVAL_S` seconds, as server-sent events; after the first one with new steps only.

        Raises:
            RequestError: 429, :data:`MAX_WATCHERS` watch already.
        """
        if self._num_watchers >= MAX_WATCHERS:
            raise RequestError(
                f"{MAX_WATCHERS} clients watch the engine already; ask /engine/stats, or try again later",
                status=429,
                type="rate_limit_error",
                code="too_many_watchers",
            )
        self._num_watchers += 1
        try:
            return await self._stream(request)
        finally:
            self._num_watchers -= 1

    async def close(self, app: web.Application) -> None:
        """End all streams, as they would never do by themselves. For ``on_shutdown``."""
        self._closing.set()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        figures = EngineFigures.of(self._engine)  # a dead engine is still an answer of its own here
        last_step = _BEFORE_ALL_STEPS
        async with JsonStream(request, SSE) as stream:
            while not self._closing.is_set():
                await stream.send(figures)
                if figures.recent_steps:
                    last_step = figures.recent_steps[-1].number
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), INTERVAL_S)
                figures = EngineFigures.of(self._engine, after_step=last_step)
        return stream.response
