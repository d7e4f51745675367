"""``GET /metrics``, as a scraper sees it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ksana.builtins import native_api, telemetry
from ksana.plugin.manager import KsanaPluginManager
from ksana.server.app import create_app, create_runner
from ksana.telemetry.metrics import engine_metrics
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig
from ksana.types.stats import EngineSnapshot, StepStats

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.anyio

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class CountingEngine(ScriptedEngine):
    """Has counted something of everything."""

    def snapshot(self) -> EngineSnapshot:
        seen = EngineSnapshot(
            num_running=3,
            blocks_used=5,
            blocks_cached=7,
            blocks_free=11,
            prompt_tokens=100,
            finished={"stop": 2},
            errors={"computation_failed": 1},
            recent_steps=[StepStats(0), StepStats(1, num_prefill_tokens=16, num_decode_tokens=4, num_requests=5)],
        )
        seen.time_to_first_token.observe(0.3)
        seen.inter_token_latency.observe(0.012, times=40)
        return seen


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    manager = KsanaPluginManager()
    manager.register(native_api)
    manager.register(telemetry)
    runner = create_runner(create_app(engine, KsanaConfig(), manager))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield session
    await runner.cleanup()


async def scrape(session: aiohttp.ClientSession) -> Samples:
    async with session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(await response.text())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_a_snapshot_arrives_whole() -> None:
    async with serving(CountingEngine()) as session:
        samples = await scrape(session)
    assert samples["ksana_requests_running", ()] == 3
    blocks = {state: samples["ksana_kv_cache_blocks", (("state", state),)] for state in ("used", "cached", "free")}
    assert blocks == {"used": 5, "cached": 7, "free": 11}
    assert samples["ksana_prompt_tokens_total", ()] == 100
    reasons = {reason: samples["ksana_requests_total", (("finish_reason", reason),)] for reason in ("stop", "abort")}
    assert reasons == {"stop": 2, "abort": 0}
    assert samples["ksana_request_errors_total", (("code", "computation_failed"),)] == 1
    assert samples["ksana_request_errors_total", (("code", "timeout"),)] == 0
    assert samples["ksana_batch_tokens", (("kind", "prefill"),)] == 16
    assert samples["ksana_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 0
    assert samples["ksana_time_to_first_token_seconds_bucket", (("le", "0.5"),)] == 1
    assert samples["ksana_time_to_first_token_seconds_bucket", (("le", "+Inf"),)] == 1
    assert samples["ksana_inter_token_latency_seconds_count", ()] == 40
    assert samples["ksana_inter_token_latency_seconds_sum", ()] == pytest.approx(0.48)
    assert samples["process_resident_memory_bytes", ()] > 0


async def test_answers_are_counted_by_route_and_status_and_clients_cannot_add_series_at_will() -> None:
    async with serving(ScriptedEngine()) as session:
        await session.post("/generate", json={"prompt": "hi", "stream": False})
        await session.post("/generate", json={"prompt": "hi", "stream": True})
        await session.post("/generate", json={"prompt": 7})
        for number in range(5):
            await session.get(f"/no/such/path/{number}")
            await session.request(f"VERB{number}", "/generate")
        samples = await scrape(session)
    counts = {labels: value for (name, labels), value in samples.items() if name == "ksana_http_requests_total"}

    def key(method: str, route: str, status: str) -> tuple[tuple[str, str], ...]:
        return (("method", method), ("route", route), ("status", status))

    assert counts[key("POST", "/generate", "200")] == 2
    assert counts[key("POST", "/generate", "400")] == 1
    assert counts[key("*", "none", "404")] == 5
    assert len(counts) <= 5


async def test_openmetrics_is_given_to_those_who_ask() -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    async with serving(CountingEngine()) as session, session.get("/metrics", headers={"Accept": accept}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert "ksana_prompt_tokens" in [family.name for family in parse_openmetrics(await response.text())]


async def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = (ROOT / "deploy/grafana/ksana.json").read_text()
    expressions = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel.get("targets", [])]
    wanted = set(re.findall(r"\b(?:ksana|process)_\w+", " ".join(expressions)))
    async with serving(CountingEngine()) as session:
        await session.get("/health")
        there = {name for name, _ in await scrape(session)}
    assert len(expressions) > 8
    assert wanted - there == set()


def test_the_documentation_lists_every_metric() -> None:
    listed = set(re.findall(r"`(ksana_\w+?)(?:_total)?`", (ROOT / "docs/metrics.md").read_text()))
    made = {metric.name for metric in engine_metrics(EngineSnapshot(), model="m", version="1")}
    assert listed == made | {"ksana_http_requests"}


def test_prometheus_is_told_to_scrape_the_route() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    assert (job["job_name"], job.get("metrics_path", "/metrics")) == ("ksana", "/metrics")
