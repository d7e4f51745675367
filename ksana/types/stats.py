"""What an engine counts about its work, as those who watch it read it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds."""

INTERVAL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds."""

LENGTH_BOUNDS = tuple(float(2**power) for power in range(18))
"""Tokens."""


@dataclass(slots=True)
class Histogram:
    """How often values fell into which range. One thread observes, any other may look.

    Attributes:
        bounds: upper bounds of the buckets, ascending; what lies above the last one has a bucket of its own.
        counts: observations in each bucket, not cumulative; one more than bounds.
        sum: of all observed values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``value``, ``times`` times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        """One that stays as it is now."""
        return Histogram(self.bounds, self.counts.copy(), self.sum)


@dataclass(slots=True)
class StepStats:
    """One step of the engine.

    Attributes:
        number: counts the steps of an engine.
        time_s: when its tokens were taken in, seconds since the epoch.
        duration_s: from its schedule until then. With ``enable_async``, steps overlap.
        num_prefill_tokens: tokens computed of prompts, and again of what preempted requests had got to.
        num_decode_tokens: all others computed.
        num_requests: requests in the batch.
    """

    number: int
    time_s: float = 0.0
    duration_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_requests: int = 0


@dataclass(slots=True)
class EngineSnapshot:
    """An engine at one moment: what it holds now, and what it has counted since its start.

    Two numbers may be a step apart.

    Attributes:
        num_running, num_waiting: requests with and without blocks now.
        blocks_used: blocks of the KV cache that requests hold.
        blocks_cached: blocks that nobody holds, whose content a prompt may still find.
        blocks_free: all other blocks. The three add up to all that exist.
        num_steps: steps computed.
        prefill_tokens, decode_tokens: tokens computed, as in :class:`StepStats`.
        prompt_tokens: of the prompts of requests that have begun to run, cached ones included. Sequences that share a
            prompt count it once.
        output_tokens: tokens generated.
        cached_tokens: prompt tokens that the prefix cache spared.
        external_cached_tokens: prompt tokens that KV connectors have loaded, by where they lay.
        prefix_queries: requests that have looked for their prompt in the prefix cache.
        prefix_hits: those that found a part of it.
        full_prefix_hits: those that found all that can be found: all but the last, perhaps partly filled block.
        preemptions: how often a request had to give its blocks back, to be computed again.
        swaps_out, swaps_in: how often a request's blocks were kept elsewhere while it waited, and how often they came
            back.
        load_failures: loads of KV connectors that brought less than was promised, or nothing in time.
        draft_tokens, accepted_draft_tokens: tokens that a drafter has proposed, and those of them that were right.
        schedule_seconds: time spent on scheduling.
        forward_seconds: time spent on computing.
        finished: requests that have ended, by finish reason.
        errors: requests that have ended by an error, by its code.
        time_to_first_token: from arrival to the first token, seconds.
        inter_token_latency: between two steps that gave a request tokens, seconds.
        request_latency: from arrival to the end of requests that were not aborted and did not fail, seconds.
        queue_time: from arrival to the first step, seconds.
        load_time: that asynchronous loads of KV connectors took, seconds.
        prompt_lengths, output_lengths: tokens of the requests in ``request_latency``.
        recent_steps: the last steps, oldest first; a bounded number.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    external_cached_tokens: dict[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    full_prefix_hits: int = 0
    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    load_failures: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTERVAL_BOUNDS))
    request_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    load_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    recent_steps: list[StepStats] = field(default_factory=list)
