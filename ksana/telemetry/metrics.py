"""The metrics by name, whatever way they leave. ``docs/metrics.md`` explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from ksana.types.stats import EngineSnapshot, Histogram

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric at one moment.

    Attributes:
        name: in the style of Prometheus, its unit at the end, without the ``_total`` of a counter.
        kind: a counter only ever grows.
        values: one for each set of labels; a :class:`Histogram` if that is the kind.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    values: list[tuple[Labels, float | Histogram]]


_COUNTERS = {
    "ksana_prompt_tokens": ("prompt_tokens", "Tokens of prompts, cached ones included."),
    "ksana_output_tokens": ("output_tokens", "Tokens generated."),
    "ksana_cached_prompt_tokens": ("cached_tokens", "Prompt tokens that the prefix cache spared."),
    "ksana_prefix_cache_queries": ("prefix_queries", "Requests that looked for their prompt in the prefix cache."),
    "ksana_prefix_cache_hits": ("prefix_hits", "Requests that found a part of their prompt there."),
    "ksana_prefix_cache_full_hits": ("full_prefix_hits", "Requests that found all but the last block of it there."),
    "ksana_kv_load_failures": ("load_failures", "Loads of KV connectors that brought too little, or too late."),
    "ksana_preemptions": ("preemptions", "Times that a request gave its blocks back, to be computed again."),
    "ksana_draft_tokens": ("draft_tokens", "Tokens proposed by speculative decoding."),
    "ksana_accepted_draft_tokens": ("accepted_draft_tokens", "Proposed tokens that were right."),
    "ksana_steps": ("num_steps", "Steps computed."),
    "ksana_schedule_seconds": ("schedule_seconds", "Time spent on scheduling."),
    "ksana_forward_seconds": ("forward_seconds", "Time spent on computing steps."),
}
_HISTOGRAMS = {
    "ksana_time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "ksana_inter_token_latency_seconds": ("inter_token_latency", "Between two steps that gave a request tokens."),
    "ksana_request_latency_seconds": ("request_latency", "From arrival to the end, of requests that ended well."),
    "ksana_queue_time_seconds": ("queue_time", "From arrival to the first step."),
    "ksana_kv_load_seconds": ("load_time", "Loads of KV connectors that go on beside steps."),
    "ksana_request_prompt_tokens": ("prompt_lengths", "Tokens in a prompt, of requests that ended well."),
    "ksana_request_output_tokens": ("output_lengths", "Tokens in an answer, of requests that ended well."),
}


def engine_metrics(snapshot: EngineSnapshot, *, model: str, version: str) -> Iterator[Metric]:
    """What is to be known about an engine.

    Args:
        model: the name that clients use.
        version: of Ksana.
    """
    yield _gauge("ksana_info", "Always 1; the labels tell.", [({"model": model, "version": version}, 1)])
    yield from _gauges(snapshot)
    for name, (attribute, text) in _COUNTERS.items():
        yield Metric(name, "counter", text, [({}, attrgetter(attribute)(snapshot))])
    computed = {"prefill": snapshot.prefill_tokens, "decode": snapshot.decode_tokens}
    yield _counter("ksana_computed_tokens", "Tokens computed.", "kind", computed)
    external = {tier: snapshot.external_cached_tokens.get(tier, 0) for tier in ("host", "disk", "remote")}
    text = "Prompt tokens that a KV connector has loaded."
    yield _counter("ksana_external_cached_prompt_tokens", text, "tier", {**external, **snapshot.external_cached_tokens})
    swaps = {"out": snapshot.swaps_out, "in": snapshot.swaps_in}
    yield _counter("ksana_swaps", "Requests swapped out of the KV cache, and back.", "direction", swaps)
    finished = {reason: snapshot.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")}
    yield _counter("ksana_requests", "Requests ended.", "finish_reason", finished)
    # The one that operators watch for is there from the start: a series that begins at 1 has no rate.
    errors = {"timeout": 0, **snapshot.errors}
    yield _counter("ksana_request_errors", "Requests ended by an error.", "code", errors)
    for name, (attribute, text) in _HISTOGRAMS.items():
        yield Metric(name, "histogram", text, [({}, attrgetter(attribute)(snapshot))])


def _gauges(snapshot: EngineSnapshot) -> Iterator[Metric]:
    yield _gauge("ksana_requests_running", "Requests that hold blocks.", [({}, snapshot.num_running)])
    yield _gauge("ksana_requests_waiting", "Requests that wait for blocks.", [({}, snapshot.num_waiting)])
    blocks = {"used": snapshot.blocks_used, "cached": snapshot.blocks_cached, "free": snapshot.blocks_free}
    text = "Blocks of the KV cache: held by requests, only findable by their content, or neither."
    yield _gauge("ksana_kv_cache_blocks", text, [({"state": state}, count) for state, count in blocks.items()])
    last = snapshot.recent_steps[-1:]
    requests = sum(step.num_requests for step in last)
    tokens = {
        "prefill": sum(step.num_prefill_tokens for step in last),
        "decode": sum(step.num_decode_tokens for step in last),
    }
    yield _gauge("ksana_batch_requests", "Requests in the last step.", [({}, requests)])
    text = "Tokens computed in the last step."
    yield _gauge("ksana_batch_tokens", text, [({"kind": kind}, count) for kind, count in tokens.items()])


def _gauge(name: str, text: str, values: list[tuple[Labels, float | Histogram]]) -> Metric:
    return Metric(name, "gauge", text, values)


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return Metric(name, "counter", text, [({label: key}, value) for key, value in values.items()])
