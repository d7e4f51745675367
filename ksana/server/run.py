"""From a configuration to a server that answers, and from a signal to its orderly end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import uvloop
from aiohttp import web

from ksana.server.app import create_app, create_runner
from ksana.server.auth import Authentication
from ksana.server.lifecycle import Lifecycle, Phase
from ksana.server.listening import bind_error, bind_socket, is_local, prepare_to_listen, url_of
from ksana.server.signals import StopSignals
from ksana.server.tls import create_ssl_context
from ksana.stdout import show
from ksana.types.config import KsanaConfig

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine
    from ksana.plugin.manager import KsanaPluginManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE_STOP_TIMEOUT_S = 10.0
"""Seconds that the engine gets to stop before the process ends without it."""

_WAITS_FOR_ENGINE = 20
"""Pieces of that time. Native code of a plugin may hold the interpreter's lock for seconds: for a deadline that has
passed meanwhile, nothing could be done. That counts as one piece."""

HURRIED_TIMEOUT_S = 1.0
"""The same, and for answers on their way, after a second signal."""


def serve(config: KsanaConfig, plugin_manager: KsanaPluginManager) -> int:
    """Run the HTTP server until it is told to stop.

    SIGTERM or SIGINT: new work is refused, running requests get ``server.shutdown_timeout_s`` to end, then they are
    aborted. A second signal ends the wait at once.

    Returns:
        The exit code: 0 after an orderly stop, 128 + signal number if a second signal cut it short.

    Raises:
        UsageError: the address is taken, a plugin dislikes its configuration, a file of keys or certificates is wrong,
            or the model cannot be loaded.
    """
    # A start makes objects by the hundred thousand, nearly all of them to stay: looking for garbage among them again
    # and again is a tenth of its time. That begins once the server is up.
    gc.disable()
    bound = bind_socket(config.server.host, config.server.port)
    with bound:
        plugin_manager.configure(config)
        server = _Server(config, plugin_manager, bound)
        atexit.register(server.leave_threads_behind)  # now, to be the last of all handlers
        return uvloop.run(server.run())


class _Server:
    """One run of the server, from loading to stopped."""

    def __init__(self, config: KsanaConfig, plugin_manager: KsanaPluginManager, bound: socket.socket) -> None:
        self._config = config
        self._plugin_manager = plugin_manager
        self._bound = bound
        # What can be wrong about these shows before the model is loaded.
        self._ssl_context = create_ssl_context(config.server)
        self._authentication = Authentication(config, plugin_manager)
        self._lifecycle = Lifecycle()
        self._threads_before = set(threading.enumerate())
        self._exit_code: int | None = None

    def leave_threads_behind(self) -> None:
        """Called at the end of the process: end it now if a daemon thread is left after an orderly stop.

        A plugin's thread that is still busy, or waits for somebody who does not answer, would be waited for by the exit
        handlers of the native library that it uses.
        """
        left = [thread.name for thread in threading.enumerate() if thread.daemon and thread not in self._threads_before]
        if left and self._exit_code is not None:
            logger.debug("Exiting without waiting for %s", ", ".join(left))
            _exit_now(self._exit_code)

    async def run(self) -> int:
        signals = StopSignals()
        signals.install()
        engine = await self._load_engine(signals)
        try:
            runner = await self._open(engine)
        except BaseException:
            await _stop_engine(engine, "the server could not start", timeout_s=ENGINE_STOP_TIMEOUT_S, exit_code=1)
            raise
        await signals.first.wait()
        self._lifecycle.advance(Phase.DRAINING)
        exit_code = await self._stop(engine, runner, signals)
        self._lifecycle.advance(Phase.STOPPED)
        logger.info("Stopped")
        self._exit_code = exit_code
        return exit_code

    async def _load_engine(self, signals: StopSignals) -> AsyncEngine:
        logger.info("Loading model %s", self._config.model.model)
        loading = asyncio.ensure_future(_run_in_daemon_thread(self._start_engine))
        stop = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("Told to stop while loading: exiting")
            _exit_now(0)
        stop.cancel()
        return loading.result()

    def _start_engine(self) -> AsyncEngine:
        from ksana.engine.async_engine import AsyncEngine

        return AsyncEngine.start(self._config, self._plugin_manager)

    async def _open(self, engine: AsyncEngine) -> web.AppRunner:
        app = create_app(engine, self._config, self._plugin_manager, self._lifecycle, self._authentication)
        runner = create_runner(app)
        await runner.setup()
        prepare_to_listen(self._bound)
        try:
            await web.SockSite(runner, self._bound, backlog=1024, ssl_context=self._ssl_context).start()
        except OSError as error:
            raise bind_error(self._config.server.host, self._config.server.port, error) from None
        # What has been loaded stays: a collector that looked at all of it would hold up everybody for 0.1 s.
        gc.freeze()
        gc.enable()
        self._lifecycle.advance(Phase.READY)
        if not self._authentication.required and not is_local(self._bound):
            logger.warning("Whoever reaches this port may use the server; --api-key-file FILE asks for a key")
        url = url_of(self._bound, secure=self._ssl_context is not None)
        show(_greeting(url, engine, app, needs_key=self._authentication.required))
        return runner

    async def _stop(self, engine: AsyncEngine, runner: web.AppRunner, signals: StopSignals) -> int:
        in_order = asyncio.create_task(self._stop_in_order(engine, runner))
        second = asyncio.create_task(signals.second.wait())
        await asyncio.wait((in_order, second), return_when=asyncio.FIRST_COMPLETED)
        if in_order.done():
            second.cancel()
            in_order.result()
            return 0
        logger.warning("Told a second time to stop: stopping at once")
        in_order.cancel()
        await asyncio.wait((in_order,), timeout=HURRIED_TIMEOUT_S)
        await engine.abort_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), HURRIED_TIMEOUT_S)
        exit_code = 128 + signals.last
        await _stop_engine(engine, "told twice to stop", timeout_s=HURRIED_TIMEOUT_S, exit_code=exit_code)
        return exit_code

    async def _stop_in_order(self, engine: AsyncEngine, runner: web.AppRunner) -> None:
        timeout_s = self._config.server.shutdown_timeout_s
        logger.info("Stopping: no new requests; %d running get %.0f s to end", engine.num_unfinished(), timeout_s)
        if not await engine.drain(timeout_s):
            logger.warning("Aborting %d requests that did not end within %.0f s", engine.num_unfinished(), timeout_s)
            await engine.abort_all()
        await runner.cleanup()
        await _stop_engine(engine, "told to stop", timeout_s=ENGINE_STOP_TIMEOUT_S, exit_code=1)


async def _stop_engine(engine: AsyncEngine, reason: str, *, timeout_s: float, exit_code: int) -> None:
    """Stop the engine; if it takes longer than ``timeout_s``, end the process with ``exit_code`` without it."""
    stopping = asyncio.ensure_future(engine.stop(reason))
    try:
        for _ in range(_WAITS_FOR_ENGINE):
            await asyncio.wait((stopping,), timeout=timeout_s / _WAITS_FOR_ENGINE)
            if stopping.done():
                stopping.result()
                return
    finally:
        stopping.cancel()
    logger.error("The engine did not stop within %.0f s: exiting without it", timeout_s)
    _exit_now(exit_code)


async def _run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Run ``function`` in a thread that, unlike an executor's, nobody has to wait for when told to stop meanwhile."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not result.done():
            setter(value)

    def work() -> None:
        try:
            value = function()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, result.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, result.set_result, value)

    threading.Thread(target=work, name="ksana-load", daemon=True).start()
    return await result


def _exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads: one of them is deep in native code that cannot be interrupted."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is when it was closed before the start
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


def _greeting(url: str, engine: AsyncEngine, app: web.Application, *, needs_key: bool) -> str:
    paths = {resource.canonical for resource in app.router.resources()}
    lines = [
        f"Ksana is ready on {url} (model {engine.served_model_name}, up to {engine.max_model_len} tokens)",
        "Try it:",
    ]
    examples = {
        "/v1/chat/completions": '{"messages": [{"role": "user", "content": "Hello!"}]}',
        "/generate": '{"prompt": "Once upon a time", "sampling_config": {"max_new_tokens": 32}, "stream": false}',
    }
    key = ' -H "Authorization: Bearer $KSANA_API_KEY"' if needs_key else ""
    for path, body in examples.items():
        if path in paths:
            lines.append(f"  curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'")
    if "/" in paths:
        lines.append(f"  or open {url} in a browser")
    lines.append("Stop with Ctrl-C.")
    return "\n".join(lines)
