"""What the engine counts about its work. All of it costs some microseconds a step, whatever is in the batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from dataclasses import replace
from typing import Any

from ksana.engine.output_processor import OutputDelta
from ksana.scheduling import RequestUpdate, Scheduler
from ksana.scheduling.kv_transfers import KVTransfers
from ksana.types.output import FinishReason
from ksana.types.request import Request
from ksana.types.stats import EngineSnapshot, StepStats
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

RECENT_STEPS = 120
"""Steps that a snapshot remembers one by one."""


class EngineStats:
    """Hears of steps and requests on the engine's thread; any thread may take a :meth:`snapshot`.

    Args:
        scheduler: whose requests and blocks a snapshot counts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._counted = EngineSnapshot()
        self._recent: deque[StepStats] = deque(maxlen=RECENT_STEPS)
        self._in_flight: dict[int, tuple[StepStats, float]] = {}
        self._starting: dict[str, Request] = {}  # requests that have begun to run and have no token yet
        self._prefilling: dict[str, tuple[Request, int]] = {}  # and the number of tokens at which that ends
        self._intervals = TokenIntervals()

    def step_scheduled(self, started: float, step: SchedulerOutput) -> None:
        """A step is about to be computed.

        Args:
            started: when its schedule began, by ``time.monotonic``.
        """
        counted = self._counted
        counted.schedule_seconds += time.monotonic() - started
        for new in step.new_requests:
            request = self._scheduler.requests[new.request_id]
            self._prefilling[request.request_id] = request, request.num_tokens
            if request.num_preemptions == 0:
                self._request_started(request, shares_prompt=new.num_computed_tokens > request.num_cached_tokens)
        counts = step.num_scheduled_tokens
        if not counts:
            return  # the worker drops rows, and computes nothing
        num_prefill = self._num_prefill_tokens(counts) if self._prefilling else 0
        stats = StepStats(step.number, 0.0, 0.0, num_prefill, sum(counts.values()) - num_prefill, len(counts))
        self._in_flight[step.number] = stats, started

    def step_processed(
        self, step: SchedulerOutput, output: ModelRunnerOutput, updates: list[RequestUpdate], compute_seconds: float
    ) -> None:
        """The output of a step has been taken in. The requests that it ends are reported afterwards.

        Args:
            compute_seconds: that all computed steps together took.
        """
        if step.number not in self._in_flight:
            return
        stats, started = self._in_flight.pop(step.number)
        counted, now = self._counted, time.monotonic()
        stats.time_s, stats.duration_s = time.time(), now - started
        self._recent.append(stats)
        counted.num_steps += 1
        counted.forward_seconds = compute_seconds
        counted.prefill_tokens += stats.num_prefill_tokens
        counted.decode_tokens += stats.num_decode_tokens
        if step.draft_token_ids:
            self._count_drafts(step.draft_token_ids, output.sampled_token_ids)
        if step.draft_token_ids or output.candidates:
            counted.output_tokens += sum(len(update.new_token_ids) for update in updates)
        else:
            counted.output_tokens += len(updates)
        if output.candidates:  # the tokens of a beam search come all at once, and have no intervals
            updates = [update for update in updates if update.request.request_id in output.sampled_token_ids]
        if updates:
            self._observe_intervals(output.sampled_token_ids, len(updates), now)

    def step_failed(self) -> None:
        """A step has failed; those behind it will not be computed."""
        self._in_flight.clear()

    def request_finished(self, request: Request, delta: OutputDelta) -> None:
        """A request has ended."""
        counted, stats, reason = self._counted, delta.stats, delta.finish_reason
        self._intervals.forget(request.request_id)
        self._prefilling.pop(request.request_id, None)
        self._starting.pop(request.request_id, None)
        assert stats is not None and stats.finished_time is not None and reason is not None
        counted.finished[reason.value] = counted.finished.get(reason.value, 0) + 1
        if delta.error is not None:
            code = delta.error.code or "unknown"
            counted.errors[code] = counted.errors.get(code, 0) + 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            counted.request_latency.observe(stats.finished_time - stats.arrival_time)
            counted.prompt_lengths.observe(stats.num_prompt_tokens)
            counted.output_lengths.observe(stats.num_output_tokens)

    def snapshot(self) -> EngineSnapshot:
        """The engine now. Safe on any thread: what is copied while the engine counts is copied in one call of C."""
        scheduler, kv, counted = self._scheduler, self._scheduler.kv, self._counted
        free, cached = kv.num_free_blocks, kv.num_free_cached_blocks
        return replace(
            counted,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_used=kv.num_usable_blocks - free,
            blocks_cached=cached,
            blocks_free=free - cached,
            preemptions=scheduler.num_preemptions,
            **_transfer_counts(scheduler.transfers),
            external_cached_tokens=counted.external_cached_tokens.copy(),
            finished=counted.finished.copy(),
            errors=counted.errors.copy(),
            time_to_first_token=counted.time_to_first_token.copy(),
            inter_token_latency=counted.inter_token_latency.copy(),
            request_latency=counted.request_latency.copy(),
            queue_time=counted.queue_time.copy(),
            prompt_lengths=counted.prompt_lengths.copy(),
            output_lengths=counted.output_lengths.copy(),
            recent_steps=list(self._recent.copy()),
        )

    def _request_started(self, request: Request, *, shares_prompt: bool) -> None:
        counted, num_external = self._counted, request.num_external_tokens
        num_cached = request.num_cached_tokens - num_external
        self._starting[request.request_id] = request
        if request.first_scheduled_time is not None:
            counted.queue_time.observe(request.first_scheduled_time - request.arrival_time)
        if shares_prompt:
            return  # another sequence of the same request has computed it
        counted.prompt_tokens += request.num_prompt_tokens
        counted.cached_tokens += num_cached
        if num_external:
            by_tier, tier = counted.external_cached_tokens, request.external_tier
            by_tier[tier] = by_tier.get(tier, 0) + num_external
        counted.prefix_queries += 1
        if num_cached > 0:
            counted.prefix_hits += 1
            counted.full_prefix_hits += request.num_prompt_tokens - num_cached <= self._scheduler.kv.block_size

    def _num_prefill_tokens(self, counts: dict[str, int]) -> int:
        num_prefill = 0
        for request_id, (request, end) in list(self._prefilling.items()):
            num_prefill += counts.get(request_id, 0)
            if request.num_computed_tokens + request.num_in_flight >= end:
                del self._prefilling[request_id]
        return num_prefill

    def _count_drafts(self, drafts: dict[str, list[int]], sampled: dict[str, list[int]]) -> None:
        for request_id, tokens in drafts.items():
            self._counted.draft_tokens += len(tokens)
            self._counted.accepted_draft_tokens += max(0, len(sampled.get(request_id, ())) - 1)

    def _observe_intervals(self, sampled: dict[str, list[int]], num_updates: int, now: float) -> None:
        """Most requests got their last token in the last step: these are counted, only the others are looked at."""
        counted = self._counted
        interval, others = self._intervals.advance(sampled, self._scheduler.requests, now)
        # What was computed for a request that has ended meanwhile is among the ids, but not among the updates.
        counted.inter_token_latency.observe(interval, max(0, num_updates - len(others)))
        for request_id, own_interval in others.items():
            request = self._starting.pop(request_id, None)
            if own_interval is not None:
                counted.inter_token_latency.observe(own_interval)
            elif request is not None:
                counted.time_to_first_token.observe(now - request.arrival_time)


def _transfer_counts(transfers: KVTransfers | None) -> dict[str, Any]:
    """Fields of a snapshot."""
    if transfers is None:
        return {}
    return {
        "swaps_out": transfers.swaps_out,
        "swaps_in": transfers.swaps_in,
        "load_failures": transfers.load_failures,
        "load_time": transfers.load_time.copy(),
    }


class TokenIntervals:
    """How long requests waited for tokens since they got their last ones.

    Most steps give tokens to the very requests that the step before did, and then a comparison is all it costs.
    """

    def __init__(self) -> None:
        self._last: dict[str, list[int]] = {}
        self._last_time = 0.0
        self._older: dict[str, float] = {}  # when those got their last token that got none in the last step

    def advance(
        self, sampled: dict[str, list[int]], unfinished: Container[str], now: float
    ) -> tuple[float, dict[str, float | None]]:
        """A step has given tokens to the requests in ``sampled``.

        Returns:
            Seconds since the last step that gave tokens, and by request the own interval of each that got none then;
            None for a first token.
        """
        others: dict[str, float | None] = {}
        if sampled.keys() != self._last.keys():
            for request_id in set(self._last).symmetric_difference(sampled):
                if request_id in sampled:
                    before = self._older.pop(request_id, None)
                    others[request_id] = None if before is None else now - before
                elif request_id in unfinished:
                    self._older[request_id] = self._last_time
        interval = now - self._last_time
        self._last, self._last_time = sampled, now
        return interval, others

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._older.pop(request_id, None)
