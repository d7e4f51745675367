"""Results as files: JSON with everything, CSV with the columns of KsanaLLM's benchmark, CSV with the answers."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from ksana.bench.metrics import Distribution, Metrics
from ksana.bench.records import RequestRecord
from ksana.cli.output_files import write_file

SCHEMA = 1
"""Number of the JSON's shape; raised when a key changes its meaning or goes."""


def metrics_dict(metrics: Metrics, percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures of a run as plain values; the rate is null where there was none."""
    return {
        "request_rate": None if metrics.rate is None or math.isinf(metrics.rate) else metrics.rate,
        "concurrency": metrics.concurrency,
        "burst": metrics.burst,
        "duration_s": metrics.duration_s,
        "requests": {
            "planned": metrics.num_planned,
            "completed": metrics.num_completed,
            "failed": metrics.num_failed,
            "interrupted": metrics.num_interrupted,
        },
        "tokens": {
            "input": metrics.prompt_tokens,
            "cached": metrics.cached_tokens,
            "output": metrics.output_tokens,
            "counted_by": metrics.count_sources,
        },
        "throughput": {
            "requests_per_s": metrics.request_throughput,
            "input_tokens_per_s": metrics.input_throughput,
            "output_tokens_per_s": metrics.output_throughput,
        },
        "ttft_ms": _distribution(metrics.ttft, percentiles),
        "itl_ms": _distribution(metrics.itl, percentiles),
        "tpot_ms": _distribution(metrics.tpot, percentiles),
        "latency_ms": _distribution(metrics.latency, percentiles),
        "finish_reasons": metrics.finish_reasons,
        "errors": {kind: {"count": count, "example": detail} for kind, (count, detail) in metrics.errors.items()},
        "client_load": metrics.client_load,
    }


def record_dict(record: RequestRecord, start_s: float) -> dict[str, Any]:
    """One request; its times count from the start of the run, in milliseconds."""
    return {
        "index": record.index,
        "sent_ms": (record.sent_s - start_s) * 1000,
        "chunks_ms": [(time - start_s) * 1000 for time in record.chunk_times],
        "end_ms": (record.end_s - start_s) * 1000,
        "input_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "error": None if record.failure is None else asdict(record.failure),
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document``; a file that is there already is replaced as a whole."""
    data = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    write_file(path, lambda part: part.write_bytes(data))


def write_perf_csv(path: Path, runs: Sequence[Metrics], percentiles: Sequence[float]) -> None:
    """Write one row for each run. Times are in seconds, throughputs per second.

    ``Concurrency`` is the limit of requests in flight, or the size of a burst where there is no limit. Token throughput
    counts prompts and answers. The streaming columns are there if answers were streamed.
    """
    rows = [_perf_row(run, percentiles) for run in runs]
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

    write_file(path, write)


def write_texts(path: Path, texts: Sequence[str | None]) -> None:
    """Write one answer a row, in the order of the workload and without a header; empty where there is none."""

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([text or ""] for text in texts)

    write_file(path, write)


def _distribution(values: Distribution, percentiles: Sequence[float]) -> dict[str, float | None]:
    figures = {"mean": values.mean, **{f"p{percent:g}": values.percentile(percent) for percent in percentiles}}
    figures |= {"min": values.percentile(0), "max": values.percentile(100)}
    return {name: None if value is None else value * 1000 for name, value in figures.items()}


def _perf_row(run: Metrics, percentiles: Sequence[float]) -> dict[str, Any]:
    count = run.num_completed or 1
    row = {
        "Request rate": run.rate,
        "Concurrency": run.concurrency or run.burst,
        "Total latency": run.duration_s,
        "Request throughput": run.request_throughput,
        "Avg latency": run.latency.mean,
        "Avg input chars": run.prompt_chars / count,
        "Avg output chars": run.output_chars / count,
        "Avg input tokens": run.prompt_tokens / count,
        "Avg output tokens": run.output_tokens / count,
        "Token throughput": run.input_throughput + run.output_throughput,
        **{f"P{percent:g} latency": run.latency.percentile(percent) for percent in percentiles},
    }
    if run.is_streamed:
        for name, values in (("TTFT", run.ttft), ("ITL", run.itl), ("TPOT", run.tpot)):
            row |= {f"Avg {name}": values.mean, f"Median {name}": values.percentile(50)}
            row |= {f"P{percent:g} {name}": values.percentile(percent) for percent in percentiles}
    return row
