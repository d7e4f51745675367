"""Continuous batching under one token budget.

There is no prefill phase and no decode phase: a request has ``num_computed_tokens`` that chases ``num_tokens``, and a
step moves each request on by as many tokens as the budget allows. The running ones come first (they decode, and people
watch), then waiting ones are admitted while blocks and budget last.
"""

from __future__ import annotations

import math
from functools import partial

from ksana.kv.prefix_cache import PrefixHit
from ksana.scheduling.beam_group import BeamGroup
from ksana.scheduling.beam_steps import schedule_beams, update_beams
from ksana.scheduling.kv_transfers import NO_OFFER, KVTransfers, Offer
from ksana.scheduling.refusals import load_failed_error
from ksana.scheduling.request_book import RequestBook
from ksana.scheduling.request_update import RequestUpdate, append_tokens
from ksana.scheduling.speculation import Speculator
from ksana.scheduling.step_budget import StepBudget
from ksana.types.kv import BlockCounts, cdiv
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockTableUpdate, ModelRunnerOutput, NewRequestData, SchedulerOutput

_MAX_UNDECIDED = 16
"""Requests in a step about which a KV connector may put off its answer, while others behind them are admitted."""


class Scheduler(RequestBook):
    """Plans the steps of an engine. It owns its requests, and is the only one to change them.

    Not thread-safe: one thread calls it. Arguments are those of :class:`RequestBook`.
    """

    _num_steps = 0
    _expected_decoding = 0

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, at the earliest when all steps but the last one have been taken in.

        Of the requests, only ``num_in_flight`` and their blocks change before the update. Blocks that a request gives
        up are free at once, though a step in flight may still write there: steps are computed in order, so that the
        next owner writes later, and nobody finds a block by content that was not committed.
        """
        step = SchedulerOutput(number=self._num_steps)
        self._num_steps += 1
        budget, num_preemptions = StepBudget(self.config, self._expected_decoding), self.num_preemptions
        self._schedule_running(step, budget)
        if self.num_preemptions == num_preemptions:
            # Whoever was preempted in this step must not come back in it, and nobody may overtake it.
            self._schedule_waiting(step, budget)
        self._expected_decoding = budget.num_decoding_next
        step.removed_request_ids, self._removed_ids = self._removed_ids, []
        step.block_copies = self.kv.take_block_copies()
        if self.transfers is not None:
            self.transfers.complete(step)
        return step

    def take_in_transfers(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Take in what was loaded and saved by the end of a step; to be called before its tokens are.

        What was computed on blocks that have not come is taken out of the step and its output.

        Returns:
            Requests that have ended by that.
        """
        transfers, news = self.transfers, output.kv_connector_output
        if transfers is None or news is None:
            return []
        changes = transfers.take_in(step.number, news)
        for request in changes.loaded:
            self._loaded.add(request)
        for request in changes.spoilt + changes.failed:
            step.num_scheduled_tokens.pop(request.request_id, None)
            output.discard(request.request_id)
        for request in changes.spoilt:
            if request.status is RequestStatus.RUNNING:
                self._running.remove(request)
                self._preempt(request)
        for request in changes.failed:
            self.fail(request.request_id, load_failed_error())
        return changes.failed

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
                updates += self._update_beams(request, num_scheduled, output)
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

    def _schedule_running(self, step: SchedulerOutput, budget: StepBudget) -> None:
        if self.transfers is not None:
            self._swap_out_early(self.transfers)
        budget.reserved = self._short_prompts_waiting(budget)
        running = RequestStatus.RUNNING
        for request in list(self._running):
            if budget.tokens == 0 or request.status is not running:  # the rest has been preempted
                break
            if request.beam_group is None:
                self._advance(request, budget, step)
            else:
                self._advance_beams(request, request.beam_group, budget, step)
        budget.reserved = 0

    def _short_prompts_waiting(self, budget: StepBudget) -> int:
        """Tokens of the short prompts that are the next to be admitted, up to half a step."""
        num_tokens, limit = 0, budget.tokens // 2
        for index in range(min(len(self._waiting), self.config.max_num_seqs - self._num_rows)):
            request = self._waiting[index]
            if num_tokens >= limit or not budget.is_short(request.num_tokens):
                break
            num_tokens += request.num_tokens
        return min(num_tokens, limit)

    def _advance(self, request: Request, budget: StepBudget, step: SchedulerOutput) -> None:
        """Move a running request on, if there are tokens and blocks for it."""
        in_flight, num_known = request.num_in_flight, len(request.all_token_ids)
        start = request.num_computed_tokens + in_flight
        if start >= request.max_computed_tokens:
            return  # the step in flight samples its last token, which nobody needs to compute
        if in_flight and self._awaits_output(request, start):
            return
        # A request whose known tokens are all under way goes on with the one that is about to be sampled.
        count = min(num_known - start, self.max_chunk, budget.tokens) if num_known > start + 1 else 1
        is_prompt = count > 1
        if is_prompt:
            count = min(count, budget.for_prompt(num_known - start))
            if count == 0:
                return
        elif self.speculator is not None and start == num_known - 1:
            count += self._draft(request, self.speculator, budget.tokens, step)
        update = self.kv.grow(request, in_flight + count)
        if update is None:
            update = self._grow_at_others_expense(request, in_flight + count, served=request, swap=True)
            if update is None:
                step.draft_token_ids.pop(request.request_id, None)
                return
        if update is not self.kv.no_update or self._forked_ids:
            self._tell_of_blocks(request, update, step)
        step.num_scheduled_tokens[request.request_id] = count
        request.num_in_flight = in_flight + count
        if is_prompt:
            budget.spend_on_prompt(count, is_last=start + count == num_known)
        else:
            budget.tokens -= count
            budget.num_decoding += 1

    def _advance_beams(self, leader: Request, group: BeamGroup, budget: StepBudget, step: SchedulerOutput) -> None:
        """Move all beams of a search on, or none."""
        num_left = leader.num_tokens - leader.num_computed_tokens - leader.num_in_flight
        count = group.num_to_schedule(budget.tokens, budget.for_prompt(num_left), self.max_chunk)
        if count <= 0:
            return
        spent = schedule_beams(leader, count, partial(self._grow_at_others_expense, served=leader), self.kv, step)
        if count > 1:
            budget.spend_on_prompt(spent, is_last=count == num_left)
        else:
            budget.tokens -= spent
            budget.num_decoding += spent

    def _tell_of_blocks(self, request: Request, update: BlockTableUpdate, step: SchedulerOutput) -> None:
        """Describe the block table of a request that goes on, or all of it, if it has been forked off since."""
        request_id = request.request_id
        if request_id in self._forked_ids:
            self._forked_ids.discard(request_id)
            step.new_requests.append(NewRequestData.of(request, self.kv.block_ids(request_id)))
        elif not update.is_empty:
            step.block_table_updates[request_id] = update

    def _grow_at_others_expense(
        self, request: Request, num_new_tokens: int, *, served: Request, swap: bool = False
    ) -> BlockTableUpdate | None:
        """Make room for tokens; those that come last give way.

        Args:
            served: for whom it is done.
            swap: blocks may be swapped out, which takes longer than this step.

        Returns:
            None if ``served`` gave way itself, or if there will be room in a later step.
        """
        while (update := self.kv.grow(request, num_new_tokens)) is None:
            if swap and self.transfers is not None and self.transfers.is_swapping_out:
                return None
            if self._loaded:
                self._give_back(self._loaded.pop_last())
                continue
            victim = self._running.pop_last()
            if not (swap and self._swap_out(victim)):
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
        if not self.kv.has_free_blocks(num_running * self.kv.max_new_blocks(1 + speculator.max_tokens)):
            return 0
        limit = min(request.max_total_tokens - request.num_tokens, self.max_chunk, budget - num_running) - 1
        drafts = speculator.propose(request, num_running, limit)
        if drafts:
            step.draft_token_ids[request.request_id] = drafts
        return len(drafts)

    def _awaits_output(self, request: Request, start: int) -> bool:
        """True if what the step in flight computes for a request decides whether, and where, it goes on."""
        if self.transfers is not None and request.request_id in self.transfers.unverified:
            return True  # it may be worthless
        if self.speculator is None or start < request.num_tokens:
            return False
        # Drafts are in flight, and some may be rejected; or the next one follows what is sampled now.
        return start > request.num_tokens or self.speculator.may_propose(request, self._num_rows)

    def _swap_out_early(self, transfers: KVTransfers) -> None:
        """Have blocks free before a running request must wait for them: the last ones give way, one batch at a time."""
        running = self._running
        missing = math.ceil(len(running) * self.config.swapout_block_threshold) - self.kv.num_free_blocks
        if missing <= 0 or transfers.is_swapping_out:
            return
        while missing > 0 and len(running) > 1:
            request = running.pop_last()
            num_blocks = cdiv(request.num_computed_tokens, self.kv.block_size)
            if not self._swap_out(request):
                running.add(request)
                return
            missing -= num_blocks

    def _schedule_waiting(self, step: SchedulerOutput, budget: StepBudget) -> None:
        """Admit from the front; the first that does not fit ends it, so that nobody starves.

        When many have come at once, the larger half of them is enough for a step that is large already: their answers
        begin before the others' prompts are computed. Whom a connector has no answer for yet is passed over, and is
        the first to be asked about in the next step.
        """
        transfers = self.transfers
        if transfers is not None:
            if transfers.is_swapping_out:
                return
            self._schedule_loaded(step, budget, transfers)
            if self._loaded:
                return
        num_later, enough = self._num_for_later_steps(), budget.tokens - self.config.max_mixed_prefill_tokens
        num_undecided = 0
        while num_undecided < min(len(self._waiting), _MAX_UNDECIDED) and budget.tokens > 0:
            if len(self._waiting) <= num_later and budget.tokens <= enough:
                return
            request = self._waiting[num_undecided]
            if self._num_rows + request.sampling.num_beams > self.config.max_num_seqs:
                return
            hit, offer = self.kv.find_prefix(request), NO_OFFER
            if transfers is not None and request.beam_group is None:
                answer = transfers.lookup(request, hit.num_tokens)
                if answer is None:
                    num_undecided += 1
                    continue
                offer = answer
            if not self._has_room_for(request, hit):
                return
            if transfers is not None and offer.is_async:
                if transfers.num_loads >= self.config.max_num_seqs:
                    return
                needed = self.kv.peak_blocks(request.num_tokens + 1, self.max_uncommitted)
                if transfers.begin_load(request, hit, offer, needed):
                    self._waiting.remove(request)
                    continue
                offer = NO_OFFER  # a window can hold the end of what is cached or of what is loaded, and not both
            if not self._admit(request, hit, offer, budget, step):
                return

    def _num_for_later_steps(self) -> int:
        """Of those who wait, how many may be left to later steps: none, if many are running already.

        A first part of five eighths makes the mean wait hardly longer than one of a half, and most requests belong to
        it even if the first ones came a step before the others.
        """
        num_running, num_waiting = len(self._running), len(self._waiting)
        if not self.config.max_mixed_prefill_tokens or num_running >= num_waiting // 2:
            return 0
        return 3 * (num_running + num_waiting) // 8

    def _admit(self, request: Request, hit: PrefixHit, offer: Offer, budget: StepBudget, step: SchedulerOutput) -> bool:
        """Let a waiting request run; the step may begin with loading some of its tokens.

        Returns:
            False, with nothing changed, if there are too few tokens or free blocks left.
        """
        num_loading = offer.num_tokens
        num_left = request.num_tokens - hit.num_tokens - num_loading
        count = min(self.max_chunk, budget.for_prompt(num_left))
        if count == 0:
            return False
        block_ids = self.kv.admit(request, hit, num_loading + count, num_external_tokens=num_loading)
        if block_ids is None:
            return False
        self._waiting.remove(request)
        request.num_computed_tokens = hit.num_tokens
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = hit.num_tokens
        if self.transfers is not None and request.beam_group is None:
            self.transfers.begin(request, block_ids, offer, step.number)
        self._start(request, block_ids, count, step, num_loading)
        budget.spend_on_prompt(count, is_last=count == num_left)
        return True

    def _schedule_loaded(self, step: SchedulerOutput, budget: StepBudget, transfers: KVTransfers) -> None:
        """Whose blocks have been loaded runs before others are admitted.

        Should they stand in each other's way, those that come last give back what was loaded.
        """
        while self._loaded and self._num_rows < self.config.max_num_seqs:
            request = self._loaded[0]
            num_left = request.num_tokens - request.num_computed_tokens
            count = min(self.max_chunk, budget.for_prompt(num_left))
            if count == 0:
                break
            if self.kv.grow(request, count) is not None:
                self._loaded.remove(request)
                transfers.run_loaded(request)
                self._start(request, self.kv.block_ids(request.request_id), count, step)
                budget.spend_on_prompt(count, is_last=count == num_left)
            elif self._running:
                break
            else:
                self._give_back(self._loaded.pop_last())

    def _has_room_for(self, request: Request, hit: PrefixHit) -> bool:
        """True if there are blocks for all tokens of a waiting request, and enough left for others.

        Each running request may want one before this one ends, or more, and those that are loading go on then.
        """
        is_swapped = request.status is RequestStatus.SWAPPED
        threshold = self.config.swapin_block_threshold if is_swapped else self.config.launch_block_threshold
        needed = self._needed_blocks(request)
        if self.transfers is not None:
            needed = self.transfers.add_awaited_blocks(needed)
        return self.kv.can_admit(hit, needed, math.ceil(self._num_rows * threshold))

    def _needed_blocks(self, request: Request) -> BlockCounts:
        """Most blocks that a request holds until all its tokens are computed, with a token more for each beam."""
        group = request.beam_group
        if group is None:
            return self.kv.peak_blocks(request.num_tokens, self.max_uncommitted)
        return group.needed_blocks(self.kv, self.max_uncommitted)

    def _update_beams(self, leader: Request, num_scheduled: int, output: ModelRunnerOutput) -> list[RequestUpdate]:
        dropped, ends = update_beams(leader, num_scheduled, output, self.kv)
        self._removed_ids += dropped
        for update, status in reversed(ends):  # the leader last, lest the search is handed over
            self._finish(update.request, status)
        return [update for update, _ in ends]
