"""Metrics as a plugin, on by default: ``GET /metrics``, and what an OpenTelemetry collector is told if one is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.markers import hookimpl

if TYPE_CHECKING:
    from aiohttp import web

    from ksana.engine.async_engine import AsyncEngine
    from ksana.types.config import KsanaConfig


@hookimpl
def ksana_configure(config: KsanaConfig) -> None:
    """Check that what shall be pushed can be."""
    if not config.telemetry.otlp_endpoint:
        return
    try:
        from ksana.telemetry.otlp.export import check_config
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-endpoint needs OpenTelemetry, but there is no module {error.name}; "
            "in a checkout of Ksana: pip install '.[otlp]'"
        ) from error
    check_config(config.telemetry)


@hookimpl
def ksana_register_routes(app: web.Application, engine: AsyncEngine) -> None:
    """Add the route, and begin to count the server's answers."""
    from ksana.telemetry.http_counts import http_counts_of
    from ksana.telemetry.route import MetricsHandler
    from ksana.telemetry.source import MetricsSource

    app.router.add_get("/metrics", MetricsHandler(MetricsSource(engine, http_counts_of(app))).get)


@hookimpl
def ksana_engine_started(engine: AsyncEngine) -> None:
    """Begin to push."""
    if engine.config.telemetry.otlp_endpoint:
        from ksana.telemetry.otlp.export import OtlpExport

        engine.plugin_manager.register(OtlpExport(engine, engine.config.telemetry), "otlp-export")
