"""Where the scheduler meets the KV connector: loads, saves and swaps that are under way, and their deadlines."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from ksana.connectors.base import SchedulerConnector
from ksana.kv.manager import KVCacheManager
from ksana.kv.prefix_cache import PrefixHit
from ksana.scheduling.kept_blocks import KeptBlocks
from ksana.scheduling.kv_load import KVLoad
from ksana.scheduling.load_attempts import LoadAttempts
from ksana.types.config import KVTransferConfig
from ksana.types.kv import BlockCounts, cdiv
from ksana.types.kv_transfer import KVConnectorOutput
from ksana.types.request import Request, RequestStatus
from ksana.types.stats import LATENCY_BOUNDS, Histogram
from ksana.types.step import BlockIds, SchedulerOutput

logger = logging.getLogger(__name__)

_WARNING_INTERVAL_S = 10.0
"""While loads fail, one warning in so long; metrics count the others."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens behind the cached ones that a connector could load, and whether that takes more than a step."""

    num_tokens: int = 0
    is_async: bool = False


NO_OFFER = Offer()


@dataclass(slots=True)
class TransferNews:
    """What a step's transfers did to requests.

    Attributes:
        loaded: their asynchronous load has ended. They hold blocks, and ``num_computed_tokens`` says what is in them.
        spoilt: the step computed with blocks whose synchronous load has failed: its results are worthless. What is
            good of the blocks is findable.
        failed: those of either kind that shall end, since the policy says so.
    """

    loaded: list[Request] = field(default_factory=list)
    spoilt: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)


class KVTransfers:
    """Keeps account of every block that a transfer may touch. The scheduler alone calls it, and changes no queue here.

    A request is in one of these states at most: *asked* (the connector does not know yet), *loading*, *loaded* (it
    holds blocks and waits for a row), *swapping* (its blocks are still read). Blocks of a request that has ended, or
    whose load has timed out, are *kept* until the worker has said that nobody touches them.

    Args:
        connector: its scheduler side.
        kv: the block tables.
        config: policy and deadlines.
        clock: seconds, monotonic.

    Attributes:
        swaps_out, swaps_in, load_failures: counted since the start.
        load_time: of asynchronous loads, seconds.
    """

    def __init__(
        self,
        connector: SchedulerConnector,
        kv: KVCacheManager,
        config: KVTransferConfig,
        clock: Callable[[], float],
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._config = config
        self._clock = clock
        self._next_warning = -math.inf
        groups = kv.config.groups
        self._no_blocks: BlockIds = tuple([] for _ in groups)
        self._window_groups = [index for index, group in enumerate(groups) if group.sliding_window is not None]
        self._attempts = LoadAttempts(config.load_timeout_s, clock)
        self._loading: dict[str, KVLoad] = {}
        self._loading_in_step: dict[str, tuple[int, KVLoad]] = {}  # with the number of the step
        self._awaited_blocks: dict[str, BlockCounts] = {}  # that requests will want when their load has ended
        self._swapping: set[str] = set()
        self._sending = KeptBlocks("sending", config.free_timeout_s, clock)
        self._receiving = KeptBlocks("receiving", config.free_timeout_s, clock)
        self.swaps_out = self.swaps_in = self.load_failures = 0
        self.load_time = Histogram(LATENCY_BOUNDS)

    # -- how much is under way ---------------------------------------------------------------------------------

    @property
    def num_loads(self) -> int:
        """Requests that are loading, or have loaded and do not run yet."""
        return len(self._awaited_blocks)

    def add_awaited_blocks(self, counts: BlockCounts) -> BlockCounts:
        """Add what those requests will want beyond what they hold: others had better leave it."""
        for awaited in self._awaited_blocks.values():
            counts = tuple(map(operator.add, counts, awaited))
        return counts

    @property
    def is_swapping_out(self) -> bool:
        """True while blocks of requests that were swapped out are still being read."""
        return bool(self._swapping)

    @property
    def is_swapping_in(self) -> bool:
        """True while a request that was swapped out is being loaded."""
        return any(load.status is RequestStatus.SWAPPED for load in self._loading.values())

    @property
    def unverified(self) -> Set[str]:
        """Requests that compute with blocks that are loaded in the same step: their results may be worthless."""
        return self._loading_in_step.keys()

    def has_pending(self) -> bool:
        """True if the worker must be asked although there is nothing to compute."""
        return bool(self._loading or self._sending or self._receiving or self._connector.has_pending())

    # -- admission ---------------------------------------------------------------------------------------------

    def lookup(self, request: Request, num_cached_tokens: int) -> Offer | None:
        """What could be loaded behind the cached tokens; None if that is not known yet."""
        request_id = request.request_id
        if self._attempts.are_over(request_id):
            return NO_OFFER
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(request, num_cached_tokens)
        if num_tokens is None:
            return None if self._attempts.may_ask_again(request_id) else NO_OFFER
        self._attempts.note_answer(request_id)
        num_tokens = min(num_tokens, self._num_wanted_tokens(request) - num_cached_tokens)
        if request.status is not RequestStatus.SWAPPED:
            num_tokens -= num_tokens % self._kv.block_size
        return Offer(num_tokens, is_async) if num_tokens > 0 else NO_OFFER

    def begin_load(self, request: Request, hit: PrefixHit, offer: Offer, needed: BlockCounts) -> bool:
        """Give a waiting request blocks, and have them filled over the coming steps.

        Args:
            needed: most blocks that it holds until it has computed all its tokens, and one more.

        Returns:
            False, with nothing changed, if there are too few free blocks.
        """
        size, end = self._kv.block_size, hit.num_tokens + offer.num_tokens
        remote = self._kv.remote_loading
        remote.get_request_prefix_block_number_before_remote_cache_loading(request, hit)
        num_blocks = cdiv(end, size) - hit.num_tokens // size
        block_ids = remote.allocate_blocks_for_remote_cache(request, num_blocks, remote.num_swa_blocks_for(end))
        if block_ids is None:
            remote.cancel(request)
            return False
        load = self._describe(request, block_ids, hit.num_tokens, offer.num_tokens)
        self._loading[request.request_id] = load
        windows = (block_ids[group] for group in self._window_groups)
        held = len(block_ids[0]), *(len(window) - window.count(0) for window in windows)
        self._awaited_blocks[request.request_id] = tuple(map(_missing, needed, held))
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        return True

    def begin(self, request: Request, block_ids: BlockIds, offer: Offer = NO_OFFER, step_number: int = 0) -> None:
        """A request gets blocks, and runs. The step may begin with loading some of them.

        ``num_computed_tokens`` does not count those until the worker has said that they have come.
        """
        if offer.num_tokens == 0:
            self._connector.update_state_after_alloc(request, block_ids, 0)
            return
        load = self._describe(request, block_ids, request.num_computed_tokens, offer.num_tokens)
        self._loading_in_step[request.request_id] = step_number, load
        load.count_in_request(load.end)

    def run_loaded(self, request: Request) -> None:
        """A request whose load has ended runs now."""
        del self._awaited_blocks[request.request_id]

    # -- the way out -------------------------------------------------------------------------------------------

    def swap_out(self, request: Request) -> bool:
        """Have the computed tokens of a running request kept elsewhere. Its blocks stay until they are read.

        Returns:
            False, with nothing changed, if no connector has room for them, or if they would not be loaded again.
        """
        num_tokens, request_id = request.num_computed_tokens, request.request_id
        if self._attempts.are_over(request_id):
            return False
        if not self._connector.swap_out(request, self._kv.block_ids(request_id), num_tokens):
            return False
        self._swapping.add(request_id)
        self._sending.keep(request, lambda: self._end_swap_out(request))
        self.swaps_out += 1
        return True

    def preempt(self, request: Request) -> None:
        """Give back the blocks of a request that runs, or has loaded and does not run yet."""
        self._awaited_blocks.pop(request.request_id, None)
        self._connector.request_preempted(request)
        self._kv.free(request)

    def finish(self, request: Request) -> None:
        """A request ends in whatever state. Its blocks are free now, or when no transfer touches them any more."""
        request_id = request.request_id
        self._attempts.forget(request_id)
        self._awaited_blocks.pop(request_id, None)
        self._loading_in_step.pop(request_id, None)
        is_loading = self._loading.pop(request_id, None) is not None
        is_swapping = request_id in self._swapping
        self._swapping.discard(request_id)
        has_blocks = self._kv.has_blocks(request_id)
        block_ids = self._kv.block_ids(request_id) if has_blocks else self._no_blocks
        must_stay, request.kv_transfer_params = self._connector.request_finished(request, block_ids)
        if is_loading:
            self._receiving.keep(request, lambda: self._kv.free(request))
        elif must_stay and has_blocks and not is_swapping:
            self._sending.keep(request, lambda: self._kv.free(request))
        elif not is_swapping:
            self._kv.free(request)

    # -- steps -------------------------------------------------------------------------------------------------

    def complete(self, step: SchedulerOutput) -> None:
        """The step is planned: add what the worker side of the connector has to hear."""
        step.connector_metadata = self._connector.build_connector_meta(step)
        step.polls_connector = self.has_pending()

    def take_in(self, step_number: int, output: KVConnectorOutput) -> TransferNews:
        """The worker's news, with the output of a step."""
        news = TransferNews()
        self._connector.on_worker_output(output)
        for request_id in output.finished_sending:
            self._sending.release(request_id)
        if output.invalid_blocks:
            for load in self._loading.values():
                load.note_invalid(output.invalid_blocks)
        for request_id in sorted(output.finished_receiving):
            if request_id in self._loading:
                self._end_load(self._loading.pop(request_id), news)
            else:
                self._receiving.release(request_id)
        for number, load in list(self._loading_in_step.values()):
            if number <= step_number:
                del self._loading_in_step[load.request.request_id]
                load.note_invalid(output.invalid_blocks)
                self._end_load_in_step(load, news)
        return news

    def expire(self) -> list[Request]:
        """Give up what has taken too long.

        Returns:
            Requests whose load has timed out: they have no blocks, and their status is that of before.
        """
        now = self._clock()
        self._receiving.expire(now)
        for request in self._sending.expire(now):
            self._connector.request_preempted(request)  # what is read from now on is another's
            if request.status is RequestStatus.SWAPPED:  # nobody knows what has been kept of it
                request.status = RequestStatus.PREEMPTED
                self._attempts.end(request.request_id)
        late = [load for load in self._loading.values() if load.started + self._config.load_timeout_s <= now]
        for load in late:
            self._abandon(load)
        if late:
            logger.warning(
                "%d request(s) waited more than %g s for blocks; what they miss is computed",
                len(late),
                self._config.load_timeout_s,
            )
        return [load.request for load in late]

    @property
    def fails_requests(self) -> bool:
        """True if a request ends when its load fails, instead of being computed."""
        return self._config.load_failure_policy == "fail"

    def drop_steps(self) -> None:
        """A step has failed, and no step is in flight any more: what they were to load is not there."""
        self._loading_in_step.clear()

    def reset_cache(self) -> None:
        """Forget what is stored beyond the cache."""
        self._connector.reset_cache()

    def shutdown(self) -> None:
        """The engine stops."""
        self._connector.shutdown()

    def _num_wanted_tokens(self, request: Request) -> int:
        """Tokens that may come from elsewhere: full blocks, and all that was computed of what was swapped out."""
        if request.status is RequestStatus.SWAPPED:
            return request.num_tokens - 1
        size = self._kv.block_size
        return min(request.num_tokens - 1, request.max_cached_tokens) // size * size

    def _describe(self, request: Request, block_ids: BlockIds, num_cached: int, num_external: int) -> KVLoad:
        self._connector.update_state_after_alloc(request, block_ids, num_external)
        return KVLoad(
            request=request,
            status=request.status,
            block_ids=block_ids,
            num_cached_tokens=num_cached,
            num_external_tokens=num_external,
            block_size=self._kv.block_size,
            started=self._clock(),
            tier=self._connector.tier_of(request),
        )

    def _end_load(self, load: KVLoad, news: TransferNews) -> None:
        """An asynchronous load is over: what has come becomes findable."""
        request = load.request
        self.load_time.observe(self._clock() - load.started)
        if self._note_failure(load) and self.fails_requests:
            news.failed.append(request)
            return
        request.status = load.status
        request.num_computed_tokens = min(self._confirm(load), request.num_tokens - 1)
        load.count_in_request(request.num_computed_tokens)
        self.swaps_in += load.status is RequestStatus.SWAPPED
        news.loaded.append(request)

    def _confirm(self, load: KVLoad) -> int:
        """Keep the blocks that have come; returns how many tokens from the start are usable."""
        size, remote = self._kv.block_size, self._kv.remote_loading
        num_blocks = load.num_good_tokens(ignored_groups=self._window_groups) // size
        window_blocks = remote.remote_swa_blocks(load.request)
        arrived = [index for index, block in enumerate(window_blocks) if block not in load.invalid]
        tail = 0 if load.invalid else load.end % size  # in a last block that is not full: what was swapped out
        usable = remote.confirm_remote_cache_loading_result(load.request, num_blocks, arrived, int(tail > 0))
        return usable + tail if usable == num_blocks * size else usable

    def _end_load_in_step(self, load: KVLoad, news: TransferNews) -> None:
        request, good = load.request, load.num_good_tokens()
        if self._note_failure(load):
            (news.failed if self.fails_requests else news.spoilt).append(request)
        else:
            self.swaps_in += load.status is RequestStatus.SWAPPED
        load.count_in_request(good)
        if request.status is RequestStatus.RUNNING:  # or it has lost its blocks meanwhile
            request.num_computed_tokens += good - load.num_cached_tokens
            request.num_in_flight -= good - load.num_cached_tokens
            self._kv.commit(request)

    def _note_failure(self, load: KVLoad) -> bool:
        """Count and log a load that is over if it has failed; True if so."""
        if not load.invalid:
            return False
        self.load_failures += 1
        self._attempts.note_failure(load.request.request_id)
        now, level = self._clock(), logging.DEBUG
        if now >= self._next_warning:
            self._next_warning, level = now + _WARNING_INTERVAL_S, logging.WARNING
        logger.log(
            level,
            "request %s: of %d tokens from %s, %d could not be loaded",
            load.request.request_id,
            load.num_external_tokens,
            load.tier,
            load.end - load.num_good_tokens(),
        )
        return True

    def _abandon(self, load: KVLoad) -> None:
        """Nobody waits for the load any more. It may still write, so its blocks stay out of use."""
        request = load.request
        request_id = request.request_id
        self.load_failures += 1
        del self._loading[request_id], self._awaited_blocks[request_id]
        self._attempts.end(request_id)
        self._connector.request_preempted(request)
        handle = self._kv.remote_loading.set_aside(request)
        self._receiving.keep(request, lambda: self._kv.remote_loading.release(handle))
        request.status = load.status if load.status is not RequestStatus.SWAPPED else RequestStatus.PREEMPTED

    def _end_swap_out(self, request: Request) -> None:
        self._swapping.discard(request.request_id)
        self._kv.free(request)


def _missing(needed: int, held: int) -> int:
    return max(needed - held, 0)
