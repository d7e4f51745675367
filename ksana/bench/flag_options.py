"""From parsed flags to options."""

from __future__ import annotations

import math
import os
from argparse import Namespace

from ksana.bench.options import (
    ArrivalOptions,
    BenchOptions,
    DiffOptions,
    OutputOptions,
    RepeatOptions,
    SamplingOptions,
    ServerOptions,
    WorkloadOptions,
)
from ksana.errors import UsageError


def make_options(flags: Namespace) -> BenchOptions:
    """Turn parsed flags into options.

    Raises:
        UsageError: flags contradict each other.
    """
    _check_combinations(flags)
    return BenchOptions(
        server=_server_options(flags),
        sampling=SamplingOptions(
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            stop=tuple(flags.stop),
            stop_token_ids=tuple(flags.stop_token_ids),
            ignore_eos=flags.ignore_eos,
            stream=flags.stream,
            extra_body=flags.extra_body,
        ),
        workload=_workload_options(flags),
        arrival=ArrivalOptions(
            rate=flags.request_rate,
            burst=flags.burst,
            poisson=flags.poisson,
            concurrency=flags.concurrency,
        ),
        repeat=RepeatOptions(
            num_warmups=flags.warmups,
            num_repeats=flags.repeats,
            num_rates=flags.num_rates,
            rate_step=flags.rate_step,
            max_latency_s=flags.max_latency,
            max_ttft_s=flags.max_ttft,
            bound_statistic=flags.bound_statistic,
        ),
        output=OutputOptions(
            json=flags.json,
            csv=flags.csv,
            texts=flags.output_csv,
            plot=flags.plot,
            details=flags.details,
            percentiles=flags.percentiles,
            expected=flags.diff_check,
            diff=diff_options(flags),
        ),
    )


def diff_options(flags: Namespace) -> DiffOptions:
    """The options of :func:`ksana.bench.flags.add_diff_flags`."""
    return DiffOptions(flags.diff_rouge_threshold, flags.diff_mismatch_threshold, flags.diff_output)


def _check_combinations(flags: Namespace) -> None:
    if flags.trace is not None:
        if flags.prompts is not None:
            raise UsageError("--trace and --prompts are two workloads; give one of them")
        if math.isfinite(flags.request_rate) or math.isfinite(flags.max_ttft) or math.isfinite(flags.max_latency):
            raise UsageError("a trace has its own arrival times; --speedup changes their rate")
    several = flags.num_rates is not None and flags.num_rates > 1
    searches = math.isfinite(flags.max_ttft) or math.isfinite(flags.max_latency)
    if several and math.isinf(flags.request_rate) and not searches:
        raise UsageError(
            "--num-rates needs a --request-rate to begin with, or a bound such as --max-ttft to search for"
        )


def _server_options(flags: Namespace) -> ServerOptions:
    headers = dict(flags.header)
    if key := flags.api_key or os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    return ServerOptions(
        urls=tuple(_split_urls(flags.base_url) if flags.base_url else _join_urls(flags.host, flags.port)),
        api=flags.api,
        model=flags.model,
        headers=headers,
        request_timeout_s=flags.client_timeout,
        stall_timeout_s=flags.stall_timeout,
        wait_s=flags.wait,
    )


def _split_urls(text: str) -> list[str]:
    urls = [url.strip().rstrip("/").removesuffix("/v1") for url in text.split(",")]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url: {url!r} must begin with http:// or https://")
    return urls


def _join_urls(host_list: str, port_list: str) -> list[str]:
    hosts, ports = host_list.split(","), port_list.split(",")
    for port in ports:
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"--port: {port!r} is not a port, a number from 1 to 65535")
    number = max(len(hosts), len(ports))
    if {len(hosts), len(ports)} - {1, number}:
        raise UsageError(f"--host has {len(hosts)} and --port {len(ports)}; give as many of each, or one for all")
    pairs = zip(hosts * (number // len(hosts)), ports * (number // len(ports)), strict=True)
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in pairs]


def _workload_options(flags: Namespace) -> WorkloadOptions:
    return WorkloadOptions(
        prompts=flags.prompts,
        column=flags.col_idx,
        trace=flags.trace,
        trace_block_size=flags.trace_block_size,
        trace_scale=flags.trace_scale,
        trace_duration_s=flags.trace_duration,
        speedup=flags.speedup,
        num_requests=flags.num_requests or None,
        input_len=flags.input_len,
        output_len=flags.output_len,
        max_input_len=flags.max_input_len,
        max_output_len=flags.max_output_len,
        shared_prefix_len=flags.shared_prefix_len,
        num_prefixes=flags.num_prefixes,
        token_range=flags.token_range,
        max_model_len=flags.max_model_len,
        shuffle=flags.shuffle,
        seed=flags.seed,
        prefix_seed=flags.prefix_seed,
    )
