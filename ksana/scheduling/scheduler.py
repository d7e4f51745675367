"""Continuous batching under one token budget.

There is no prefill phase and no decode phase: a request has ``num_computed_tokens`` that chases ``num_tokens``, and a
step moves each request on by as many tokens as the budget allows. The running ones come first (they decode, and people
watch), then waiting ones are admitted while blocks and budget last.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ksana.errors import RequestError
from ksana.kv.manager import KVCacheManager
from ksana.scheduling.beam_group import BeamGroup
from ksana.scheduling.queues import SORT_KEYS, RequestQueue
from ksana.scheduling.refusals import (
    never_fits_error,
    queue_full_error,
    too_many_beams_error,
    waited_too_long_error,
)
from ksana.scheduling.request_update import RequestUpdate, append_tokens, hand_out_beams
from ksana.scheduling.speculation import Speculator
from ksana.types.config import SchedulerConfig
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockTableUpdate, ModelRunnerOutput, NewRequestData, SchedulerOutput

_TIMEOUT_CHECK_INTERVAL_S = 0.1


class Scheduler:
    """Owns all requests of an engine, and is the only one to change them. Not thread-safe: one thread calls it.

    Args:
        config: budget and limits.
        kv: the block tables.
        speculator: drafts tokens for requests that decode; None for one token a step.
        clock: seconds, monotonic; for the waiting timeout.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.speculator = speculator
        if speculator is not None:
            self._max_blocks_with_drafts = kv.max_new_blocks(1 + speculator.max_tokens)
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
        self._num_rows = 0  # of the running requests in the worker; a beam search has one for each beam
        self._num_followers = 0  # requests that wait for another one to compute their prompt
        self._forked_ids: set[str] = set()  # requests that run, and of which the worker has not heard yet
        self._removed_ids: list[str] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._clock = clock
        self._next_timeout_check = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: never run yet, or preempted."""
        return len(self._waiting) + self._num_followers

    @property
    def num_running(self) -> int:
        """Requests that hold blocks; a beam search is one."""
        return len(self._running)

    def running(self) -> list[Request]:
        """The requests that hold blocks, in order of service."""
        return list(self._running)

    def has_work(self) -> bool:
        """True if a step would do something: compute tokens, or tell the worker about rows to drop."""
        return bool(self.requests or self._removed_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request, and with it those that wait for its prompt.

        Raises:
            RequestError: the queue is full (429), or the request can never fit the cache or a step (400).
        """
        assert request.request_id not in self.requests, f"duplicate request id {request.request_id}"
        if self.num_waiting + len(request.followers) >= self.config.max_waiting_queue_len:
            raise queue_full_error(self.config)
        num_beams, total = request.sampling.num_beams, request.max_total_tokens
        if num_beams > (limit := min(self.config.max_num_seqs, self.config.max_num_batched_tokens)):
            raise too_many_beams_error(num_beams, limit)
        peak = self.kv.peak_blocks_of_beams(num_beams, request.num_prompt_tokens, total, self.max_uncommitted)
        if peak > self.kv.pool.num_usable_blocks:
            raise never_fits_error(request, self.kv)
        if num_beams > 1:
            request.beam_group = BeamGroup(request)
        for sequence in request.sequences:
            sequence.arrival_order = self._num_arrived
            self._num_arrived += 1
            self.requests[sequence.request_id] = sequence
        self._num_followers += len(request.followers)
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
        """End a request, or the search of a beam, because of an error of ours, or of its plugin.

        Returns:
            None if it is unknown or has ended.
        """
        request = self.requests.get(request_id) or self._leader_of(request_id)
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
            self.fail(request.request_id, waited_too_long_error(self.config))
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
            One entry for each request that got tokens, or has ended without any.
        """
        updates = []
        requests, sampled, logprobs = self.requests, output.sampled_token_ids, output.logprobs
        block_size = self.kv.block_size
        running, drafts, speculator = RequestStatus.RUNNING, step.draft_token_ids, self.speculator
        for request_id, num_scheduled in step.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue
            if request.beam_group is not None:
                updates += self._update_beams(request, request.beam_group, num_scheduled, output)
                continue
            tokens, ended, num_rejected = sampled.get(request_id), None, 0
            if tokens:
                if request_id in drafts and speculator is not None:
                    num_rejected = speculator.observe(request, len(drafts[request_id]), len(tokens) - 1)
                tokens, ended = append_tokens(request, tokens)
                if speculator is not None and tokens:
                    speculator.update(request, tokens)
            if request.status is running:
                before = request.num_computed_tokens
                request.num_computed_tokens = computed = before + num_scheduled - num_rejected
                request.num_in_flight -= num_scheduled
                if computed // block_size > before // block_size:
                    self.kv.commit(request)
                if request.followers and computed >= request.num_prompt_tokens:
                    self._fork(request)
            if tokens is not None:
                if ended is not None:
                    self._finish(request, ended)
                entries = logprobs[request_id][: len(tokens)] if request_id in logprobs else []
                updates.append(RequestUpdate(request, tokens, entries))
        return updates

    def _schedule_running(self, step: SchedulerOutput) -> tuple[int, bool]:
        """Returns the budget left for prompts, and whether a request had to be preempted."""
        num_preemptions = self.num_preemptions
        budget = prompt_budget = self.config.max_num_batched_tokens
        mixed_budget = self.config.max_mixed_prefill_tokens or budget
        least_mixed_budget = mixed_budget // 4  # prompts go on, however many decode
        counts, grow, max_chunk = step.num_scheduled_tokens, self.kv.grow, self.max_chunk
        running, no_update, speculator = RequestStatus.RUNNING, self.kv.no_update, self.speculator
        forked = self._forked_ids
        for request in list(self._running):
            if budget == 0 or request.status is not running:  # the rest has been preempted
                break
            if request.beam_group is not None:
                count = request.beam_group.num_to_schedule(budget, prompt_budget, max_chunk)
                spent = self._schedule_beams(request, request.beam_group, count, step) if count > 0 else 0
                budget -= spent
                if count > 1:
                    prompt_budget = max(prompt_budget - spent, 0)
                else:
                    mixed_budget = max(mixed_budget - spent, least_mixed_budget)
                    prompt_budget = min(prompt_budget, mixed_budget)
                continue
            in_flight = request.num_in_flight
            start = request.num_computed_tokens + in_flight
            if start >= request.max_computed_tokens:
                continue  # the step in flight samples its last token, which nobody needs to compute
            if in_flight and speculator is not None and self._awaits_output(request, speculator, start):
                continue
            # A request whose known tokens are all under way goes on with the one that is about to be sampled.
            count = min(max(1, len(request.all_token_ids) - start), max_chunk, budget)
            if count > 1:
                count = min(count, prompt_budget)
                if count == 0:
                    continue
                prompt_budget -= count
            else:
                # Whoever decodes must not wait long for other people's prompts, and takes time in the step as well.
                mixed_budget = max(mixed_budget - 1, least_mixed_budget)
                prompt_budget = min(prompt_budget, mixed_budget)
            if speculator is not None and start == len(request.all_token_ids) - 1:
                count += self._draft(request, speculator, budget, step)
            update = grow(request, in_flight + count)
            if update is None:
                update = self._grow_at_others_expense(request, in_flight + count, request)
                if update is None:
                    break
            if forked and request.request_id in forked:
                forked.discard(request.request_id)
                step.new_requests.append(NewRequestData.of(request, self.kv.block_ids(request.request_id)))
            elif update is not no_update and not update.is_empty:
                step.block_table_updates[request.request_id] = update
            counts[request.request_id] = count
            request.num_in_flight = in_flight + count
            budget -= count
        return min(budget, prompt_budget), self.num_preemptions > num_preemptions

    def _schedule_beams(self, leader: Request, group: BeamGroup, count: int, step: SchedulerOutput) -> int:
        """All beams of a search go on by ``count`` tokens, or none does; returns the tokens scheduled."""
        updates = []
        for beam in group.beams:
            update = self._grow_at_others_expense(beam, beam.num_in_flight + count, leader)
            if update is None:
                return 0
            updates.append(update)
        group.schedule(count, updates, self.kv, step)
        return count * len(updates)

    def _grow_at_others_expense(
        self, request: Request, num_new_tokens: int, served: Request
    ) -> BlockTableUpdate | None:
        """Make room for tokens; those that come last give way. None if ``served``, for whom it is done, did itself."""
        while (update := self.kv.grow(request, num_new_tokens)) is None:
            victim = self._running.pop_last()
            self._preempt(victim)
            if victim is served:
                return None
        return update

    def _draft(self, request: Request, speculator: Speculator, budget: int, step: SchedulerOutput) -> int:
        """Draft tokens for a request whose last token is about to be computed; returns how many.

        They fit into the length that the request may reach, into the budget that the others leave if each takes a
        token, and into blocks that nobody will miss: nobody is preempted for a draft.
        """
        num_running = self._num_rows
        if self.kv.num_free_blocks < num_running * self._max_blocks_with_drafts:
            return 0
        limit = min(request.max_total_tokens - request.num_tokens, self.max_chunk, budget - num_running) - 1
        drafts = speculator.propose(request, num_running, limit)
        if drafts:
            step.draft_token_ids[request.request_id] = drafts
        return len(drafts)

    def _awaits_output(self, request: Request, speculator: Speculator, start: int) -> bool:
        """True if what the step in flight samples decides where the request goes on, or what is drafted for it."""
        if start > request.num_tokens:
            return True  # drafts are in flight: some may be rejected
        return start == request.num_tokens and speculator.may_propose(request, self._num_rows)

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        """Admit from the front; the first that does not fit ends it, so that nobody starves.

        While nobody runs, half of those who wait are enough for a step that is large already: their answers begin
        before the others' prompts are computed.
        """
        large = self.config.max_mixed_prefill_tokens
        second_half = len(self._waiting) // 2 if large and not self._running else 0
        enough = budget - large
        while self._waiting and budget > 0:
            if len(self._waiting) <= second_half and budget <= enough:
                return
            request = self._waiting[0]
            if self._num_rows + request.sampling.num_beams > self.config.max_num_seqs:
                return
            hit = self.kv.find_prefix(request)
            count = min(request.num_tokens - hit.num_tokens, self.max_chunk, budget)
            # Each running request may want a block before this one ends: leave one for each.
            if not self.kv.can_admit(hit, self._needed_blocks(request), reserve=self._num_rows):
                return
            block_ids = self.kv.admit(request, hit, count)
            if block_ids is None:
                return
            self._waiting.remove(request)
            self._running.add(request)
            self._num_rows += request.sampling.num_beams
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = hit.num_tokens
                request.first_scheduled_time = self._clock()
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = hit.num_tokens
            request.num_in_flight = count
            step.new_requests.append(NewRequestData.of(request, block_ids))
            step.num_scheduled_tokens[request.request_id] = count
            budget -= count

    def _needed_blocks(self, request: Request) -> int:
        """Most blocks that a request holds until all its tokens are computed, with a token more for each beam."""
        group = request.beam_group
        if group is None:
            return self.kv.peak_blocks(request.num_tokens, self.max_uncommitted)
        return group.needed_blocks(self.kv, self.max_uncommitted)

    def _update_beams(
        self, leader: Request, group: BeamGroup, num_scheduled: int, output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        if leader.status is not RequestStatus.RUNNING:
            return []  # preempted meanwhile: beams would go on in blocks that they have lost
        self._removed_ids += group.update(num_scheduled, output.candidates, self.kv)
        return self._finish_beams(leader, group) if group.search.is_done else []

    def _finish_beams(self, leader: Request, group: BeamGroup) -> list[RequestUpdate]:
        ends = hand_out_beams(leader, group.search.finished)
        for update, status in reversed(ends):  # the leader last, lest the search is handed over
            self._finish(update.request, status)
        return [update for update, _ in ends]

    def _leader_of(self, beam_id: str) -> Request | None:
        return next((r for r in self._running if r.beam_group is not None and r.beam_group.has_row(beam_id)), None)

    def _fork(self, leader: Request) -> None:
        """The prompt is computed: the others of its sequences go on from its blocks.

        Each computes the prompt's last token again, in a copy of its block, to draw a first token of its own. Those for
        whom there is no room wait like any other request, and may find the prompt in the cache.
        """
        followers, leader.followers = leader.followers, []
        self._num_followers -= len(followers)
        for follower in followers:
            follower.leader = None
            follower.forget_captures()
            wanted = self.kv.max_new_blocks(1) * (self._num_rows + 1)
            if self._num_rows >= self.config.max_num_seqs or self.kv.num_free_blocks < wanted:
                follower.status = RequestStatus.WAITING
                self._waiting.add(follower)
                continue
            self.kv.fork(leader, follower, leader.num_prompt_tokens)
            follower.status = RequestStatus.RUNNING
            follower.num_computed_tokens = leader.num_prompt_tokens - 1
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.first_scheduled_time = self._clock()
            self._running.add(follower)
            self._num_rows += 1
            self._forked_ids.add(follower.request_id)

    def _succeed(self, leader: Request) -> None:
        """A request has ended before its prompt was computed: the next of its sequences takes its place."""
        first, *rest = leader.followers
        leader.followers = []
        first.lead(rest)
        first.status = RequestStatus.WAITING
        if leader.beam_group is not None:
            leader.beam_group.hand_over(first)
            if leader.first_scheduled_time is not None:
                first.status = RequestStatus.PREEMPTED
        self._num_followers -= 1
        self._waiting.add(first)

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; its tokens stay, and are computed again when it is back (the cache may help)."""
        self._release(request)
        if request.num_computed_tokens >= request.num_prompt_tokens:
            request.forget_captures()
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_in_flight = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _release(self, request: Request) -> None:
        """Take the blocks and rows of a running request."""
        self._num_rows -= request.sampling.num_beams
        if request.beam_group is not None:
            self._removed_ids += request.beam_group.suspend(self.kv)
            return
        self.kv.free(request)
        self._forked_ids.discard(request.request_id)
        self._removed_ids.append(request.request_id)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.leader is not None:
            request.leader.followers.remove(request)
            self._num_followers -= 1
        else:
            self._waiting.remove(request)
        if request.followers:
            self._succeed(request)
        if self.speculator is not None:
            self.speculator.finish(request)
        request.status = status
        del self.requests[request.request_id]
