from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ksana.bench.command import main
from ksana.builtins import native_api
from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.live_server import live_server
from ksana.testing.tiny_models import tiny_model
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions
from ksana_openai_api import plugin as openai_plugin

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """A tiny model of 512 tokens of vocabulary and of context."""
    config = KsanaConfig(
        model=ModelOptions(model=str(tiny_model(tmp_path_factory.mktemp("model"))), served_model_name="tiny"),
        cache=CacheConfig(num_blocks=128),
        kernel=KernelConfig(threads=1),
    )
    engine = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    yield engine
    asyncio.run(engine.stop("the tests are done"))


@pytest.fixture(scope="session")
def real_url(real_engine: AsyncEngine) -> Iterator[str]:
    """A real server with both APIs."""
    with live_server(real_engine, native_api, openai_plugin) as url:
        yield url


@pytest.fixture(scope="session")
def native_url(real_engine: AsyncEngine) -> Iterator[str]:
    """A real server without the OpenAI API."""
    with live_server(real_engine, native_api) as url:
        yield url


class Bench:
    """Runs ``ksana-bench`` and keeps what it says."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._json = folder / "result.json"
        self._capsys = capsys
        self.stdout = ""
        self.stderr = ""

    def __call__(self, url: str, *flags: object) -> int:
        arguments = ["--base-url", url, "--token-range", "10:500", "--json", str(self._json), "--details"]
        code = main([*arguments, *map(str, flags)])
        self.stdout, self.stderr = self._capsys.readouterr()
        return code

    @property
    def document(self) -> dict[str, Any]:
        """The JSON file."""
        document: dict[str, Any] = json.loads(self._json.read_text())
        return document

    @property
    def run(self) -> dict[str, Any]:
        """The only run in it."""
        (run,) = self.document["runs"]
        return dict(run)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


@contextmanager
def odd_server(handler: Handler, *, status: int = 200) -> Iterator[str]:
    """A server that lists a model, with ``status``, and answers completions with ``handler``."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "odd", "max_model_len": 1000}]}, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", handler)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def odd() -> Callable[..., Any]:
    return odd_server
