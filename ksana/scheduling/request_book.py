"""Where every request of an engine stands, and how it gets from one state to another.

A request waits, runs (it has a row in the worker's batch, and blocks), or is with a KV connector: being loaded, loaded
and waiting for a row, or swapped out. What is computed in a step is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ksana.connectors.base import SchedulerConnector
from ksana.errors import RequestError
from ksana.kv.manager import KVCacheManager
from ksana.scheduling.beam_group import BeamGroup
from ksana.scheduling.beam_steps import leader_of
from ksana.scheduling.kv_transfers import KVTransfers
from ksana.scheduling.queues import SORT_KEYS, RequestQueue
from ksana.scheduling.refusals import (
    load_failed_error,
    never_fits_error,
    queue_full_error,
    too_many_beams_error,
    waited_too_long_error,
)
from ksana.scheduling.speculation import Speculator
from ksana.types.config import KVTransferConfig, SchedulerConfig
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockIds, NewRequestData, SchedulerOutput

_TIMEOUT_CHECK_INTERVAL_S = 0.1


class RequestBook:
    """All unfinished requests, their queues and their rows.

    Args:
        config: budget and limits.
        kv: the block tables.
        speculator: drafts tokens for requests that decode; None for one token a step.
        connector: loads and saves blocks of the cache.
        transfer_config: what it may do.
        clock: seconds, monotonic; for timeouts.

    Attributes:
        requests: by id.
        transfers: of the connector; None without one.
        num_preemptions: how often a request had to give its blocks back, to be computed again.
        max_chunk: most tokens of a request in a step.
        max_uncommitted: most tokens of a request between those known to be computed and the last scheduled one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        speculator: Speculator | None = None,
        connector: SchedulerConnector | None = None,
        transfer_config: KVTransferConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.speculator = speculator
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.max_chunk = min(
            config.split_fuse_token_num or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        # Blocks behind a sliding window are given back once what came after them is known to be computed: with a step
        # in flight, that is two chunks at a time.
        self.max_uncommitted = self.max_chunk * (2 if config.enable_async else 1)
        self.transfers: KVTransfers | None = None
        if connector is not None:
            self.transfers = KVTransfers(connector, kv, transfer_config or KVTransferConfig(), clock)
        key = SORT_KEYS[config.policy]
        self._waiting = RequestQueue(key)
        self._running = RequestQueue(key)
        self._loaded = RequestQueue(key)  # have blocks that a connector has filled, and wait for a row
        self._num_rows = 0  # of the running requests in the worker; a beam search has one for each beam
        self._num_followers = 0  # requests that wait for another one to compute their prompt
        self._forked_ids: set[str] = set()  # requests that run, and of which the worker has not heard yet
        self._removed_ids: list[str] = []
        self._num_arrived = 0
        self._clock = clock
        self._next_timeout_check = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new ones, those being loaded, swapped and preempted ones."""
        num_loads = 0 if self.transfers is None else self.transfers.num_loads
        return len(self._waiting) + self._num_followers + num_loads

    @property
    def num_running(self) -> int:
        """Requests in the batch; a beam search is one."""
        return len(self._running)

    def running(self) -> list[Request]:
        """The requests in the batch, in order of service."""
        return list(self._running)

    def has_work(self) -> bool:
        """True if a step would do something: compute tokens, tell the worker about rows to drop, follow transfers."""
        if self.requests or self._removed_ids:
            return True
        return self.transfers is not None and self.transfers.has_pending()

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
        if not self.kv.fits_empty(peak):
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
        """End a request in whatever state it is; None if it is unknown or has ended.

        Its blocks are free at once, unless a connector is still at them.
        """
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
        request = self.requests.get(request_id) or leader_of(request_id, self._running)
        if request is not None:
            request.error = error
            self._finish(request, RequestStatus.FINISHED_ERROR)
        return request

    def fail_running(self, error: RequestError) -> list[Request]:
        """A step has failed, and what was in flight behind it is dropped: all that run end, and are returned."""
        failed = self.running()
        for request in failed:
            self.fail(request.request_id, error)
        if self.transfers is not None:
            self.transfers.drop_steps()
        return failed

    def reset_prefix_cache(self) -> int:
        """Forget all cached content, what a connector keeps included; returns the blocks of the cache forgotten."""
        if self.transfers is not None:
            self.transfers.reset_cache()
        return self.kv.reset_prefix_cache()

    def expire_waiting(self) -> list[Request]:
        """End requests that have waited too long without ever running; returns them.

        Transfers that have taken too long are given up too: what they should have brought is computed, or the request
        ends, as the policy has it.
        """
        now = self._clock()
        if now < self._next_timeout_check:
            return []
        self._next_timeout_check = now + _TIMEOUT_CHECK_INTERVAL_S
        deadline = now - self.config.waiting_timeout_s
        expired = [
            sequence
            for queue in (self._waiting, self._loaded)
            for request in queue
            if request.arrival_time < deadline and request.status is RequestStatus.WAITING
            for sequence in reversed(request.sequences)  # the leader last, or it would be succeeded
        ]
        for request in expired:
            self.fail(request.request_id, waited_too_long_error(self.config))
        return expired if self.transfers is None else expired + self._expire_loads(self.transfers)

    def _expire_loads(self, transfers: KVTransfers) -> list[Request]:
        """Returns requests that have ended by that."""
        late = transfers.expire()
        for request in late:
            self._waiting.add(request)
        if not transfers.fails_requests:
            return []
        for request in late:
            self.fail(request.request_id, load_failed_error())
        return late

    # -- into the batch ----------------------------------------------------------------------------------------

    def _start(
        self, request: Request, block_ids: BlockIds, count: int, step: SchedulerOutput, num_loading: int = 0
    ) -> None:
        """A request that has got blocks runs from this step on, with ``count`` tokens.

        Args:
            num_loading: tokens before those that the step begins with loading.
        """
        self._running.add(request)
        self._num_rows += request.sampling.num_beams
        if request.status is RequestStatus.WAITING:
            request.first_scheduled_time = self._clock()
        request.status = RequestStatus.RUNNING
        new = NewRequestData.of(request, block_ids)
        new.num_computed_tokens += num_loading
        request.num_in_flight = num_loading + count
        step.new_requests.append(new)
        step.num_scheduled_tokens[request.request_id] = count

    def _fork(self, leader: Request) -> None:
        """The prompt is computed: the others of its sequences go on from its blocks.

        Each computes the prompt's last token again, in a copy of its block, to draw a first token of its own. Those for
        whom there is no room wait like any other request, and may find the prompt in the cache. So do all if the leader
        comes back from a preemption and is beyond the prompt: windows may have given back what its last token needs.
        """
        followers, leader.followers = leader.followers, []
        self._num_followers -= len(followers)
        can_share = leader.num_computed_tokens == leader.num_prompt_tokens
        num_full = leader.num_prompt_tokens // self.kv.block_size
        for follower in followers:
            follower.leader = None
            follower.forget_captures()
            follower.block_hashes = leader.block_hashes[:num_full]
            wanted = self.kv.max_new_blocks(1) * (self._num_rows + 1)
            has_room = self._num_rows < self.config.max_num_seqs and self.kv.has_free_blocks(wanted)
            if not (can_share and has_room):
                follower.status = RequestStatus.WAITING
                self._waiting.add(follower)
                continue
            block_ids = self.kv.fork(leader, follower, leader.num_prompt_tokens)
            if self.transfers is not None:
                self.transfers.begin(follower, block_ids)
            follower.status = RequestStatus.RUNNING
            follower.num_computed_tokens = leader.num_prompt_tokens - 1
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.num_external_tokens = leader.num_external_tokens
            follower.external_tier = leader.external_tier
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

    # -- out of the batch --------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; its tokens stay, and are computed again when it is back (the cache may help)."""
        self._drop_rows(request)
        self._free(request)
        self._wait_again(request, RequestStatus.PREEMPTED)
        self.num_preemptions += 1

    def _swap_out(self, request: Request) -> bool:
        """Have a request's computed tokens kept elsewhere, to take its blocks as soon as they are read.

        Beams share blocks in ways that nobody keeps, and what is captured of a prompt must be computed: those are
        computed again. Nor is anybody swapped out while others come back.

        Returns:
            False, with nothing changed, if that is not possible.
        """
        transfers = self.transfers
        if transfers is None or self.config.preempt_mode != "swap" or request.beam_group is not None:
            return False
        is_capturing = bool(request.captures) and request.num_computed_tokens < request.num_prompt_tokens
        if is_capturing or request.num_computed_tokens == 0 or transfers.is_swapping_in:
            return False
        if not transfers.swap_out(request):
            return False
        self._drop_rows(request)
        self._wait_again(request, RequestStatus.SWAPPED)
        return True

    def _give_back(self, request: Request) -> None:
        """A request that does not run yet loses the blocks that were loaded for it."""
        self._free(request)
        request.num_computed_tokens = 0
        if request.status is RequestStatus.SWAPPED:
            request.status = RequestStatus.PREEMPTED
        elif request.status is RequestStatus.WAITING:
            request.num_external_tokens = 0  # what it will begin with is counted when it does
        self._waiting.add(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._drop_rows(request)
        elif request.leader is not None:
            request.leader.followers.remove(request)
            self._num_followers -= 1
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KV and not self._loaded.discard(request):
            self._waiting.remove(request)
        if self.transfers is not None:
            self.transfers.finish(request)
        else:
            self.kv.free(request)
        if request.followers:
            self._succeed(request)
        if self.speculator is not None:
            self.speculator.finish(request)
        request.status = status
        request.beam_group = None  # which holds its beams, and so this one
        del self.requests[request.request_id]

    def _drop_rows(self, request: Request) -> None:
        """Take the rows of a running request, and the blocks of beams."""
        self._num_rows -= request.sampling.num_beams
        if request.beam_group is not None:
            self._removed_ids += request.beam_group.suspend(self.kv)
            return
        self._forked_ids.discard(request.request_id)
        self._removed_ids.append(request.request_id)

    def _free(self, request: Request) -> None:
        """Take the blocks of a request that will be back."""
        if self.transfers is not None:
            self.transfers.preempt(request)
        else:
            self.kv.free(request)

    def _wait_again(self, request: Request, status: RequestStatus) -> None:
        if request.num_computed_tokens >= request.num_prompt_tokens:
            request.forget_captures()
        request.status = status
        request.num_computed_tokens = request.num_in_flight = 0
        request.num_preemptions += 1
        self._waiting.add(request)
