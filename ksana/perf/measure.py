"""From the files to the result: load the model, compute every batch in its rounds, sum up."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

import ksana
from ksana.engine.assembly import EngineParts, assemble
from ksana.kernels.cpu import machine
from ksana.perf.batch_run import BatchRun, Step
from ksana.perf.config import Batch, BatchConfig, ModelPerfConfig
from ksana.perf.limits import check_capacity, check_step_limits
from ksana.perf.result import BatchResult, Environment, PerfResult, Round, Statistics, statistics_by_name
from ksana.perf.scheduler import PerfScheduler, RewindableCache
from ksana.perf.timing import TimedModel, TimingPlugin
from ksana.plugin.manager import KsanaPluginManager
from ksana.types.config import KsanaConfig, TelemetryConfig

logger = logging.getLogger(__name__)

OnRound = Callable[[Batch], None]
"""Called after each round, warm-up or not."""


def measure(
    perf: ModelPerfConfig,
    batches: BatchConfig,
    batch_file: Path,
    config: KsanaConfig,
    plugins: KsanaPluginManager,
    on_round: OnRound,
) -> PerfResult:
    """Measure all batches, on the calling thread; returns when the last one is done.

    Args:
        batch_file: where ``batches`` come from, for messages.

    Raises:
        UsageError: a batch is not one step under these settings, or the model cannot be loaded.
    """
    config = _for_measuring(config)
    check_step_limits(batches, batch_file, config.scheduler)
    plugins.configure(config)
    timing = TimingPlugin()
    plugins.register(timing, "perf_timing")
    parts = assemble(config, plugins)
    kv_config = parts.core.scheduler.kv.config
    scheduler = PerfScheduler(config.scheduler, RewindableCache(kv_config, enable_prefix_caching=False))
    check_capacity(batches, batch_file, scheduler.kv, parts.context.max_model_len)
    results = []
    for batch in batches.batches:
        run = BatchRun(batch, scheduler, parts.runner, parts.context.model_config.vocab_size)
        results.append(_measure_batch(batch, run, perf, timing, on_round))
        run.close()
        logger.info("batch %s: %.2f ms (median of %d)", batch.label, results[-1].step_ms.p50, perf.stat_round)
    return PerfResult(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        warmup_round=perf.warmup_round,
        stat_round=perf.stat_round,
        environment=_describe_environment(parts, timing),
        batches=results,
    )


def _for_measuring(config: KsanaConfig) -> KsanaConfig:
    """Nothing runs beside a measured step, no other step and nobody who writes a trace, and nothing is left of one.

    What a batch says is computed, also if a server would rather spare those who decode so much of a prompt. Requests
    begin with blocks for all their cached tokens, those outside a sliding window too.
    """
    scheduler = config.scheduler.model_copy(update={"enable_async": False, "max_mixed_prefill_tokens": 0})
    cache = config.cache.model_copy(update={"enable_prefix_caching": False, "swa_block_num_ratio": 1.0})
    return config.model_copy(update={"scheduler": scheduler, "cache": cache, "telemetry": TelemetryConfig()})


def _measure_batch(
    batch: Batch, run: BatchRun, perf: ModelPerfConfig, timing: TimingPlugin, on_round: OnRound
) -> BatchResult:
    for _ in range(perf.warmup_round):
        run.step()
        on_round(batch)
    rounds = []
    for _ in range(perf.stat_round):
        before = timing.backend.operator_seconds()
        step = run.step()
        rounds.append(_to_round(step, timing.model, before, timing.backend.operator_seconds()))
        on_round(batch)
    return BatchResult(
        name=batch.label,
        requests=batch.requests,
        num_requests=batch.num_requests,
        num_forwarding_tokens=batch.num_forwarding_tokens,
        num_cached_tokens=batch.num_cached_tokens,
        step_ms=Statistics.of([r.step_ms for r in rounds]),
        phases_ms=statistics_by_name(r.phases_ms for r in rounds),
        operators_ms=statistics_by_name(r.operators_ms for r in rounds),
        rounds=rounds,
    )


def _to_round(step: Step, model: TimedModel, before: dict[str, float], after: dict[str, float]) -> Round:
    moments = {
        "schedule": (step.started, step.scheduled),
        "prepare": (step.scheduled, model.forward_started),
        "forward": (model.forward_started, model.forward_ended),
        "logits": (model.forward_ended, model.logits_ended),
        "sample": (model.logits_ended, step.executed),
        "update": (step.executed, step.updated),
    }
    operators = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return Round(
        step_ms=(step.updated - step.started) * 1e3,
        phases_ms={name: (end - start) * 1e3 for name, (start, end) in moments.items()},
        operators_ms={name: seconds * 1e3 for name, seconds in operators.items() if seconds > 0.0},
    )


def _describe_environment(parts: EngineParts, timing: TimingPlugin) -> Environment:
    config, model = parts.context.config, parts.context.model_config
    return Environment(
        ksana=ksana.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        processor=machine.processor_name(),
        usable_cpus=machine.usable_cpus(),
        model=model.name,
        architecture=model.architecture,
        dtype=model.dtype,
        backend=timing.backend.name,
        num_blocks=parts.core.scheduler.kv.num_usable_blocks,
        settings=config.model_dump(mode="json", include={"model", "scheduler", "cache", "kernel"}),
    )
