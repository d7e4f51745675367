"""What an OpenTelemetry collector receives, and that nobody needs one to answer."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ksana import LLM, SamplingParams, UsageError
from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.server.app import create_app, create_runner
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, TelemetryConfig

TinyPath = Callable[..., Path]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes}


@pytest.fixture
def root_log() -> Iterator[list[logging.LogRecord]]:
    """What a server would write to its log."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


async def serve(model: Path, url: str, *headers: dict[str, str]) -> None:
    """Start a server that pushes to ``url``, ask it once with each of ``headers``, and stop it."""
    config = KsanaConfig(
        model=ModelOptions(model=str(model), served_model_name="tiny"),
        cache=CacheConfig(num_blocks=64),
        kernel=KernelConfig(threads=1),
        telemetry=TelemetryConfig(otlp_endpoint=url, otlp_attributes=("zone=north",)),
    )
    manager = create_plugin_manager(PluginSpecs(autoload=False))
    manager.configure(config)
    engine = await asyncio.to_thread(AsyncEngine.start, config, manager)
    runner = create_runner(create_app(engine, config, manager))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    body = {"prompt": "hello", "sampling_config": {"max_new_tokens": 5, "ignore_eos": True}, "stream": False}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        for header in headers:
            async with session.post("/generate", json=body, headers=header) as response:
                assert response.status == 200, await response.text()
    await runner.cleanup()
    await engine.stop("done")


def test_metrics_arrive_with_the_servers_own_among_them(tiny_path: TinyPath, collector) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(serve(tiny_path(), collector.url, {}, {}))
    last = collector.pushes[-1]
    assert {"service.name", "service.version"} <= collector.resources.keys()
    assert collector.resources["zone"] == "north"
    (tokens,) = last["ksana_output_tokens"].sum.data_points
    assert tokens.as_int == 10
    assert last["ksana_output_tokens"].sum.is_monotonic
    assert last["ksana_output_tokens"].sum.aggregation_temporality == (
        AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    )
    (latency,) = last["ksana_request_latency_seconds"].histogram.data_points
    assert (latency.count, sum(latency.bucket_counts)) == (2, 2)
    assert len(latency.bucket_counts) == len(latency.explicit_bounds) + 1
    assert last["ksana_request_latency_seconds"].unit == "s"
    blocks = {
        point.attributes[0].value.string_value: point for point in last["ksana_kv_cache_blocks"].gauge.data_points
    }
    assert blocks.keys() == {"used", "cached", "free"}
    (answers,) = last["ksana_http_requests"].sum.data_points
    assert answers.as_double == 2
    assert tokens.start_time_unix_nano < tokens.time_unix_nano


def test_the_span_of_a_request_continues_the_callers_trace(tiny_path: TinyPath, collector) -> None:  # type: ignore[no-untyped-def]
    before = time.time_ns()
    sampled, dropped = f"00-{TRACE}-{SPAN}-01", f"00-{'7' * 32}-{SPAN}-00"
    headers = [{"traceparent": sampled}, {}, {"traceparent": "nonsense"}, {"traceparent": dropped}]
    asyncio.run(serve(tiny_path(), collector.url, *headers))
    mine = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    others = [span for span in collector.spans if span.trace_id.hex() != TRACE]
    (span,) = mine
    assert span.parent_span_id.hex() == SPAN
    assert [other.parent_span_id for other in others] == [b"", b""]  # what a caller does not sample is left out
    assert span.kind == Span.SpanKind.SPAN_KIND_SERVER
    assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    told = attributes(span)
    assert told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.usage.input_tokens"] > 0
    assert [value.string_value for value in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert 0 <= told["ksana.queue_time_seconds"] <= told["ksana.time_to_first_token_seconds"] < 60
    assert span.status.code != Status.StatusCode.STATUS_CODE_ERROR


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_a_dead_collector_holds_nobody_up(tiny_path: TinyPath, silent: bool, root_log: list[logging.LogRecord]) -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if silent:
            port.listen(1)
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        options = {"otlp_endpoint": url, "otlp_interval_s": 0.05, "otlp_timeout_s": 0.5}
        with LLM(str(tiny_path()), threads=1, num_blocks=64, **options) as llm:
            for _ in range(3):
                (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
                assert len(output.token_ids) == 8
            deadline = time.monotonic() + 20
            while not [r for r in root_log if "Cannot push" in r.getMessage()] and time.monotonic() < deadline:
                time.sleep(0.05)
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 20  # the SDK's own patience is 30 s
    (warning,) = [record.getMessage() for record in root_log if record.levelno >= logging.WARNING]
    assert warning.startswith(f"Cannot push metrics to {url}: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"otlp_endpoint": "collector:4318"}, "--otlp-endpoint 'collector:4318' is no URL"),
        ({"otlp_endpoint": "http://"}, "is no URL"),
        ({"otlp_endpoint": "http://host:port"}, "is no URL"),
        ({"otlp_endpoint": "debug", "otlp_attributes": ("zone",)}, "--otlp-attribute 'zone' is not valid"),
    ],
)
def test_mistakes_end_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LLM("/no/such/model", **options)


def test_without_the_extra_the_operator_hears_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ksana.telemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[otlp\]'"):
        LLM("/no/such/model", otlp_endpoint="http://localhost:4318")


def test_debug_prints_what_would_be_pushed(tiny_path: TinyPath, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(str(tiny_path()), threads=1, num_blocks=64, otlp_endpoint="debug") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    printed = capfd.readouterr().out
    assert "ksana_output_tokens" in printed
    assert "gen_ai.response.model" in printed
