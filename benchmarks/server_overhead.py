"""What a streamed token costs the server without a model: processor time from the engine's news to the socket.

    python benchmarks/server_overhead.py --streams 32 --tokens 200 --interval-ms 10

The engine is the real :class:`AsyncEngine` with its streams, the server the real application on a real socket; behind
them a thread hands one token to every request at a fixed pace, as a model would. The clients are a process of their
own, which also asks ``/health`` all the time. Printed are the processor time of the event loop's thread for each
streamed token, and how long ``/health`` took while the streams ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import uvloop
from aiohttp import web

from ksana.engine.async_engine import AsyncEngine
from ksana.engine.context import ProcessingContext
from ksana.engine.output_processor import OutputDelta
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.server.app import create_app, create_runner
from ksana.testing.scripted_engine import ByteTokenizer
from ksana.types.config import KsanaConfig, SchedulerConfig
from ksana.types.model import ModelConfig, RopeConfig
from ksana.types.output import FinishReason, RequestStats
from ksana.types.request import Request

WORDS = [" the", " a", " of", " and", "ing", " \u00fcber", " kettle", "\n", ' "', " river"]

BODIES = {
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/chat/completions": {"input_tokens": [1, 2, 3]},
    "/generate": {"input_tokens": [1, 2, 3]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--interval-ms", type=float, default=10.0, help="milliseconds between two tokens")
    parser.add_argument("--rounds", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--path", choices=sorted(BODIES), help="one route; default: all")
    options = parser.parse_args()
    for path in [options.path] if options.path else BODIES:
        runs = [uvloop.run(measure(path, options)) for _ in range(options.rounds)]
        loop_us = statistics.median(run.loop_us for run in runs)
        p50 = statistics.median(run.health_ms[0] for run in runs)
        p99 = statistics.median(run.health_ms[1] for run in runs)
        print(
            f"{path:22} {options.streams:4} streams: {loop_us:6.1f} us of the event loop's thread a token; "
            f"/health p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run: microseconds of processor time a token, and (median, 99th percentile) of ``/health``."""

    loop_us: float
    health_ms: tuple[float, float]


async def measure(path: str, options: argparse.Namespace) -> Run:
    """Serve, let the clients work, and look at this thread's processor time before and after."""
    plugins = create_plugin_manager(PluginSpecs())
    config = KsanaConfig(scheduler=SchedulerConfig(max_num_seqs=options.streams))
    engine = AsyncEngine(NullLoop(options.interval_ms / 1e3), _context(config), plugins)  # type: ignore[arg-type]
    runner = create_runner(create_app(engine, config, plugins))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    body = {**BODIES[path], "stream": True}
    if path == "/generate":
        body["sampling_config"] = {"max_new_tokens": options.tokens}
    else:
        body["max_tokens"] = options.tokens
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client_process, args=(theirs, runner.addresses[0][1], path, body, options.streams))
    process.start()
    theirs.close()  # or nobody would hear of it if the process ended
    try:
        await asyncio.to_thread(ours.recv)  # it has connected, so its start is not part of the figure
        started = time.thread_time()
        ours.send("go")
        num_chunks, latencies = await asyncio.to_thread(ours.recv)
        used = time.thread_time() - started
    finally:
        await asyncio.to_thread(process.join)
        await runner.cleanup()
        await engine.stop("measured")
    num_tokens = options.streams * options.tokens
    if num_chunks < num_tokens / 2:
        raise SystemExit(f"error: {path} brought {num_chunks} chunks for {num_tokens} tokens; lengthen --interval-ms")
    if num_chunks < num_tokens:
        print(f"note: {num_chunks} chunks for {num_tokens} tokens; the pace was too fast")
    latencies.sort()
    quantiles = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    return Run(used / num_tokens * 1e6, (quantiles[0] * 1e3, quantiles[1] * 1e3))


class NullLoop:
    """What :class:`AsyncEngine` sees of a step loop: here one that gives every request a token at each tick."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._inbox: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._produced: dict[str, int] = {}

    def serve(self, deliver: Callable[[Iterable[OutputDelta]], None], die: Callable[..., None]) -> None:
        self._deliver = deliver
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[Any], None]) -> None:
        self._inbox.put(command)

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._produced[request.request_id] = 0

    def abort(self, request_id: str) -> list[OutputDelta]:
        if self._requests.pop(request_id, None) is None:
            return []
        return [OutputDelta(request_id, finish_reason=FinishReason.ABORT, stats=RequestStats())]

    def _run(self) -> None:
        due = time.monotonic()
        while self._work_off_inbox():
            due = max(due + self._interval_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            self._deliver([self._next(request) for request in list(self._requests.values())])

    def _work_off_inbox(self) -> bool:
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command(self)
        return True

    def _next(self, request: Request) -> OutputDelta:
        count = self._produced[request.request_id] = self._produced[request.request_id] + 1
        delta = OutputDelta(request.request_id, WORDS[count % len(WORDS)], [count % 100])
        if count == request.max_total_tokens - request.num_prompt_tokens:
            del self._requests[request.request_id]
            delta.finish_reason, delta.stats = FinishReason.LENGTH, RequestStats()
        return delta


def _context(config: KsanaConfig) -> ProcessingContext:
    model = ModelConfig("Null", "null", 100, 8, 8, 1, 1, 1, 8, 8192, "float32", 1e-5, RopeConfig(), True)
    return ProcessingContext(config, model, Path(), model.max_model_len, ByteTokenizer(), None)


def client_process(pipe: Any, port: int, path: str, body: dict[str, Any], num_streams: int) -> None:
    """Runs in a process of its own: all streams, and ``/health`` beside them."""
    pipe.send("ready")
    pipe.recv()
    pipe.send(uvloop.run(_clients(port, path, body, num_streams)))


async def _clients(port: int, path: str, body: dict[str, Any], num_streams: int) -> tuple[int, list[float]]:
    mark = b"\x00" if path == "/generate" else b"data: {"
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    request = f"{head}Connection: close\r\n\r\n".encode() + payload
    health = asyncio.create_task(_watch_health(port))
    counts = await asyncio.gather(*(_read_stream(port, request, mark) for _ in range(num_streams)))
    health.cancel()
    latencies: list[float] = (await asyncio.gather(health, return_exceptions=False))[0]
    return sum(counts), latencies


async def _read_stream(port: int, request: bytes, mark: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    count, tail = 0, b""
    while data := await reader.read(65536):
        data = tail + data
        count += data.count(mark)
        tail = data[-(len(mark) - 1) :] if len(mark) > 1 else b""
    writer.close()
    return count


async def _watch_health(port: int) -> list[float]:
    latencies: list[float] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            started = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            while b"healthy" not in await reader.read(4096):
                pass
            latencies.append(time.perf_counter() - started)
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        writer.close()
        return latencies


if __name__ == "__main__":
    main()
