"""Continuous batching under one token budget.

There is no prefill phase and no decode phase: a request has ``num_computed_tokens`` that chases ``num_tokens``, and a
step moves each request on by as many tokens as the budget allows. The running ones come first (they decode, and people
watch), then waiting ones are admitted while blocks and budget last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ksana.errors import KsanaCode, RequestError
from ksana.kv.manager import KVCacheManager
from ksana.scheduling.queues import SORT_KEYS, RequestQueue
from ksana.types.config import SchedulerConfig
from ksana.types.output import TokenLogprobs
from ksana.types.request import Request, RequestStatus
from ksana.types.step import ModelRunnerOutput, NewRequestData, SchedulerOutput

_TIMEOUT_CHECK_INTERVAL_S = 0.1


@dataclass(slots=True)
class RequestUpdate:
    """What a step did to a request: its new tokens, and perhaps its end (see ``request.status``).

    ``logprobs`` has an entry for each new token, or is empty if the request did not ask for them.
    """

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs]


def queue_full_error(config: SchedulerConfig) -> RequestError:
    """What a client hears for whom there is no place in the waiting queue."""
    return RequestError(
        f"the waiting queue is full ({config.max_waiting_queue_len} requests); try again later",
        status=429,
        type="rate_limit_error",
        code="queue_full",
        ksana_code=KsanaCode.QUEUE_FULL,
    )


class Scheduler:
    """Owns all requests of an engine, and is the only one to change them. Not thread-safe: one thread calls it.

    Args:
        config: budget and limits.
        kv: the block tables.
        clock: seconds, monotonic; for the waiting timeout.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.max_chunk = min(
            config.split_fuse_token_num or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        # Blocks behind a sliding window are given back once what came after them is known to be computed: with a step
        # in flight, that is two chunks at a time.
        self.max_uncommitted = self.max_chunk * (2 if config.enable_async else 1)
        key = SORT_KEYS[config.policy]
        self._waiting = RequestQueue(key)
        self._running = RequestQueue(key)
        self._removed_ids: list[str] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._clock = clock
        self._next_timeout_check = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: never run yet, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def running(self) -> list[Request]:
        """The requests that hold blocks, in order of service."""
        return list(self._running)

    def has_work(self) -> bool:
        """True if a step would do something: compute tokens, or tell the worker about rows to drop."""
        return bool(self.requests or self._removed_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the queue is full (429), or the request can never fit the cache (400).
        """
        assert request.request_id not in self.requests, f"duplicate request id {request.request_id}"
        if len(self._waiting) >= self.config.max_waiting_queue_len:
            raise queue_full_error(self.config)
        if self.kv.peak_blocks(request.max_total_tokens, self.max_uncommitted) > self.kv.pool.num_usable_blocks:
            raise RequestError(
                f"prompt and output of up to {request.max_total_tokens} tokens can never fit the KV cache of "
                f"{self.kv.pool.num_usable_blocks} blocks of {self.kv.block_size} tokens",
                code="kv_capacity",
                ksana_code=KsanaCode.LENGTH_EXCEEDED,
            )
        request.arrival_order = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; its blocks are free at once. None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    def stop(self, request: Request) -> None:
        """End a request at a stop string. Does nothing if it has ended already."""
        if not request.status.is_finished:
            self._finish(request, RequestStatus.FINISHED_STOPPED)

    def fail(self, request_id: str, error: RequestError) -> Request | None:
        """End a request because of an error of ours, or of its plugin. None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            request.error = error
            self._finish(request, RequestStatus.FINISHED_ERROR)
        return request

    def expire_waiting(self) -> list[Request]:
        """End requests that have waited too long without ever running; returns them."""
        now = self._clock()
        if now < self._next_timeout_check:
            return []
        self._next_timeout_check = now + _TIMEOUT_CHECK_INTERVAL_S
        deadline = now - self.config.waiting_timeout_s
        expired = [r for r in self._waiting if r.arrival_time < deadline and r.status is RequestStatus.WAITING]
        for request in expired:
            error = RequestError(
                f"the request waited for more than {self.config.waiting_timeout_s:g} s",
                status=503,
                type="server_error",
                code="timeout",
                ksana_code=KsanaCode.TIMEOUT,
            )
            self.fail(request.request_id, error)
        return expired

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, at the earliest when all steps but the last one have been taken in.

        Of the requests, only ``num_in_flight`` and their blocks change before the update. Blocks that a request gives
        up are free at once, though a step in flight may still write there: steps are computed in order, so that the
        next owner writes later, and nobody finds a block by content that was not committed.
        """
        step = SchedulerOutput(number=self._num_steps)
        self._num_steps += 1
        budget, preempted = self._schedule_running(step)
        if not preempted:
            # Whoever was preempted in this step must not come back in it, and nobody may overtake it.
            self._schedule_waiting(step, budget)
        step.removed_request_ids, self._removed_ids = self._removed_ids, []
        step.block_copies = self.kv.take_block_copies()
        return step

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take in what the worker has computed: advance, append tokens, end what is done.

        What was computed ahead for a request that has ended meanwhile is dropped. One that was preempted meanwhile has
        lost its blocks, but the token is as good as ever.

        Returns:
            One entry for each request that got tokens.
        """
        updates = []
        requests, sampled, logprobs = self.requests, output.sampled_token_ids, output.logprobs
        block_size = self.kv.block_size
        running = RequestStatus.RUNNING
        for request_id, num_scheduled in step.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue
            if request.status is running:
                before = request.num_computed_tokens
                request.num_computed_tokens = computed = before + num_scheduled
                request.num_in_flight -= num_scheduled
                if computed // block_size > before // block_size:
                    self.kv.commit(request)
            tokens = sampled.get(request_id)
            if tokens:
                appended = self._append(request, tokens)
                entries = logprobs[request_id][: len(appended)] if request_id in logprobs else []
                updates.append(RequestUpdate(request, appended, entries))
        return updates

    def _schedule_running(self, step: SchedulerOutput) -> tuple[int, bool]:
        """Returns the budget left for prompts, and whether a request had to be preempted."""
        preempted = False
        budget = prompt_budget = self.config.max_num_batched_tokens
        mixed_budget = self.config.max_mixed_prefill_tokens or budget
        counts, grow, max_chunk = step.num_scheduled_tokens, self.kv.grow, self.max_chunk
        running, no_update = RequestStatus.RUNNING, self.kv.no_update
        for request in list(self._running):
            if budget == 0 or request.status is not running:  # the rest has been preempted
                break
            in_flight = request.num_in_flight
            start = request.num_computed_tokens + in_flight
            if start >= request.max_total_tokens - 1:
                continue  # the step in flight samples its last token, which nobody needs to compute
            # A request whose known tokens are all under way goes on with the one that is about to be sampled.
            count = min(max(1, len(request.all_token_ids) - start), max_chunk, budget)
            if count > 1:
                count = min(count, prompt_budget)
                if count == 0:
                    continue
            elif prompt_budget > mixed_budget:
                prompt_budget = mixed_budget  # whoever decodes must not wait long for other people's prompts
            update = grow(request, in_flight + count)
            while update is None:
                preempted = True
                victim = self._running.pop_last()
                self._preempt(victim)
                if victim is request:
                    return 0, preempted
                update = grow(request, in_flight + count)
            if update is not no_update and not update.is_empty:
                step.block_table_updates[request.request_id] = update
            counts[request.request_id] = count
            request.num_in_flight = in_flight + count
            budget -= count
            if count > 1:
                prompt_budget -= count
        return min(budget, prompt_budget), preempted

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        """Admit from the front; the first that does not fit ends it, so that nobody starves."""
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            hit = self.kv.find_prefix(request)
            count = min(request.num_tokens - hit.num_tokens, self.max_chunk, budget)
            # Each running request may want a block before this one ends: leave one for each.
            if not self.kv.can_admit(request, hit, self.max_uncommitted, reserve=len(self._running)):
                return
            block_ids = self.kv.admit(request, hit, count)
            if block_ids is None:
                return
            self._waiting.remove(request)
            self._running.add(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = hit.num_tokens
                request.first_scheduled_time = self._clock()
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = hit.num_tokens
            request.num_in_flight = count
            step.new_requests.append(NewRequestData.of(request, block_ids))
            step.num_scheduled_tokens[request.request_id] = count
            budget -= count

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; its tokens stay, and are computed again when it is back (the cache may help)."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_in_flight = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._removed_ids.append(request.request_id)
        self._waiting.add(request)

    def _append(self, request: Request, tokens: list[int]) -> list[int]:
        """Append tokens up to the one that ends the request; returns those appended."""
        all_token_ids = request.all_token_ids
        for position, token in enumerate(tokens, 1):
            all_token_ids.append(token)
            if token in request.stop_token_ids:
                request.stop_reason = None if token in request.eos_token_ids else token
                self._finish(request, RequestStatus.FINISHED_STOPPED)
                return tokens[:position]
            if len(all_token_ids) >= request.max_total_tokens:
                self._finish(request, RequestStatus.FINISHED_LENGTH)
                return tokens[:position]
        return tokens

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._removed_ids.append(request.request_id)
        else:
            self._waiting.remove(request)
        self.kv.free(request)
        request.status = status
        del self.requests[request.request_id]
