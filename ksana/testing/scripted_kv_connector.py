"""A KV connector whose peers are as slow, forgetful and unreliable as a script says, over a stand-in for the cache."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

from ksana.connectors.base import SchedulerConnector
from ksana.kv import KVCacheManager
from ksana.testing.paged_memory import PagedMemory, PagedMemoryExecutor
from ksana.types.kv import cdiv
from ksana.types.kv_transfer import ConnectorMetadata, KVConnectorOutput
from ksana.types.request import Request
from ksana.types.step import BlockIds, ModelRunnerOutput, SchedulerOutput

Block = tuple[int, int]
"""(KV cache group, block id)."""


@dataclass
class TransferScript:
    """How likely each mishap is, and how long transfers take, in steps of the worker."""

    undecided: float = 0.0
    sync: float = 0.0
    max_delay: int = 0
    lost_block: float = 0.0
    never_received: float = 0.0
    never_sent: float = 0.0
    swap_room: int = 0
    """Requests that can be swapped out at a time."""
    saves: bool = True
    lost_keys: set[Any] = field(default_factory=set)
    """What is found by lookups, and never comes."""


@dataclass(eq=False)
class _Transfer:
    request_id: str
    blocks: list[tuple[Block, Any]]
    """Each with its key in the store."""
    is_load: bool
    is_sync: bool = False
    is_urgent: bool = False
    due: float = 0.0


@dataclass
class _Metadata(ConnectorMetadata):
    transfers: list[_Transfer] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


class ScriptedKVConnector(SchedulerConnector):
    """The scheduler side; ``worker`` is the other one.

    It fails as soon as the core breaks a promise of the interface.

    Attributes:
        stored: content of blocks by key.
        finished: requests whose end has been told.
    """

    tier = "host"

    def __init__(self, kv: KVCacheManager, memory: PagedMemory, script: TransferScript, seed: int = 0) -> None:
        self._kv = kv
        self._script = script
        self._rng = random.Random(seed)
        self.stored: dict[Any, list[int | None]] = {}
        self.finished: set[str] = set()
        self.worker = ScriptedWorker(memory, self.stored, script, self._rng)
        self._running: dict[str, tuple[Request, int]] = {}
        self._swapped: dict[str, tuple[int, int]] = {}
        self._lookups: dict[str, tuple[int, bool]] = {}
        self._numbers = itertools.count()
        self._next = _Metadata()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert request.request_id not in self.finished
        assert num_computed_tokens % self._kv.block_size == 0
        if self._rng.random() < self._script.undecided:
            return None, True
        if request.request_id in self._swapped:
            _, kept = self._swapped[request.request_id]
            self._lookups[request.request_id] = num_computed_tokens, True
            return max(0, kept - num_computed_tokens), True
        count = self._num_stored_tokens(request, num_computed_tokens)
        is_async = self._rng.random() >= self._script.sync
        self._lookups[request.request_id] = num_computed_tokens, is_async
        return count, is_async

    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        request_id, size = request.request_id, self._kv.block_size
        assert request_id not in self.finished
        if num_external_tokens:
            start, is_async = self._lookups[request_id]
            first, end = start // size, cdiv(start + num_external_tokens, size)
            number, _ = self._swapped.get(request_id, (None, 0))
            blocks = [
                (
                    (group, ids[index]),
                    (group, request.block_hashes[index]) if number is None else (number, group, index),
                )
                for group, ids in enumerate(block_ids)
                for index in range(first, end)
                if ids[index]
            ]
            self._next.transfers.append(_Transfer(request_id, blocks, is_load=True, is_sync=not is_async))
        self._swapped.pop(request_id, None)
        self._running[request_id] = request, 0

    def build_connector_meta(self, step: SchedulerOutput) -> _Metadata | None:
        if self._script.saves:
            for request_id in step.num_scheduled_tokens:
                if request_id in self._running:
                    self._save(request_id)
        meta, self._next = self._next, _Metadata()
        return meta if meta.transfers or meta.preempted else None

    def swap_out(self, request: Request, block_ids: BlockIds, num_tokens: int) -> bool:
        assert 0 < num_tokens < request.num_tokens
        if len(self._swapped) >= self._script.swap_room:
            return False
        number = next(self._numbers)
        blocks = [
            ((group, ids[index]), (number, group, index))
            for group, ids in enumerate(block_ids)
            for index in range(cdiv(num_tokens, self._kv.block_size))
            if ids[index]
        ]
        self._swapped[request.request_id] = number, num_tokens
        self._running.pop(request.request_id)
        self._next.transfers.append(_Transfer(request.request_id, blocks, is_load=False))
        self.worker.awaited.add(request.request_id)
        return True

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        assert request_id not in self.finished, f"{request_id}: its end is told twice"
        self.finished.add(request_id)
        if request_id in self._running and self._script.saves and any(block_ids):
            self._save(request_id)
        self._running.pop(request_id, None)
        self._swapped.pop(request_id, None)
        is_saving = self.worker.is_saving(request_id) or any(
            transfer.request_id == request_id and not transfer.is_load for transfer in self._next.transfers
        )
        if is_saving:
            self.worker.awaited.add(request_id)
        return is_saving, None

    def request_preempted(self, request: Request) -> None:
        self._running.pop(request.request_id, None)
        self._swapped.pop(request.request_id, None)
        transfers = self._next.transfers
        self._next.transfers = [t for t in transfers if t.is_load or t.request_id != request.request_id]
        self._next.preempted.add(request.request_id)

    def has_pending(self) -> bool:
        return bool(self._next.transfers) or self.worker.is_busy

    def assert_empty(self) -> None:
        """Nothing of any request is remembered."""
        assert not self._running
        assert not self._swapped

    def _num_stored_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens behind the computed ones that could be loaded: an endpoint must have its windows."""
        size = self._kv.block_size
        first = num_computed_tokens // size
        end = min(len(request.block_hashes), (request.num_tokens - 1) // size, request.max_cached_tokens // size)
        groups = list(enumerate(self._kv.config.groups))
        for last in range(end, first, -1):
            for group_id, group in groups:
                begin = first
                if group.window_blocks is not None:
                    begin = max(first, last - group.window_blocks)
                hashes = request.block_hashes[begin:last]
                if not all((group_id, block_hash) in self.stored for block_hash in hashes):
                    break
            else:
                return (last - first) * size
        return 0

    def _save(self, request_id: str) -> None:
        request, start = self._running[request_id]
        end = min(request.num_computed_tokens // self._kv.block_size, len(request.block_hashes))
        if end <= start:
            return
        self._running[request_id] = request, end
        for group, ids in enumerate(self._kv.block_ids(request_id)):
            blocks = [((group, ids[i]), (group, request.block_hashes[i])) for i in range(start, end) if ids[i]]
            # The block of a window may be given back at the end of the step: it is read before.
            is_urgent = self._kv.config.groups[group].sliding_window is not None
            self._next.transfers.append(_Transfer(request_id, blocks, is_load=False, is_urgent=is_urgent))


class ScriptedWorker:
    """The worker side. Time goes on by one in every step."""

    def __init__(
        self, memory: PagedMemory, stored: dict[Any, list[int | None]], script: TransferScript, rng: random.Random
    ) -> None:
        self._memory = memory
        self._stored = stored
        self._script = script
        self._rng = rng
        self._now = 0
        self._transfers: list[_Transfer] = []
        self.awaited: set[str] = set()

    @property
    def is_busy(self) -> bool:
        """True if something will end yet, or be reported."""
        return any(transfer.due < math.inf for transfer in self._transfers) or bool(self.awaited - self._never())

    def is_saving(self, request_id: str) -> bool:
        """True while blocks of the request are read."""
        return any(t.request_id == request_id and not t.is_load for t in self._transfers)

    def execute(self, step: SchedulerOutput, executor: PagedMemoryExecutor) -> ModelRunnerOutput:
        """The step, with the transfers before and after it."""
        self._now += 1
        self._memory.copy(step.block_copies)
        spoilt: set[str] = set()
        news = KVConnectorOutput()
        if step.connector_metadata is not None:
            assert isinstance(step.connector_metadata, _Metadata)
            self._begin(step.connector_metadata, spoilt, news)
        output = executor.compute(step, spoilt)
        for transfer in [transfer for transfer in self._transfers if transfer.due <= self._now]:
            self._transfers.remove(transfer)
            if transfer.is_load:
                news.invalid_blocks |= self._load(transfer)
                news.finished_receiving.add(transfer.request_id)
            else:
                for (group_id, block_id), key in transfer.blocks:
                    self._stored[key] = self._memory.read_block(group_id, block_id)
        news.finished_sending = {request_id for request_id in self.awaited if not self.is_saving(request_id)}
        self.awaited -= news.finished_sending
        output.kv_connector_output = news
        return output

    def _begin(self, meta: _Metadata, spoilt: set[str], news: KVConnectorOutput) -> None:
        self._transfers = [t for t in self._transfers if t.is_load or t.request_id not in meta.preempted]
        for transfer in meta.transfers:
            if transfer.is_sync:
                invalid = self._load(transfer)
                if invalid:
                    spoilt.add(transfer.request_id)
                news.invalid_blocks |= invalid
                continue
            never = self._script.never_received if transfer.is_load else self._script.never_sent
            delay = self._rng.randint(0, self._script.max_delay)
            transfer.due = math.inf if self._rng.random() < never else self._now + delay
            if transfer.is_urgent:
                transfer.due = self._now
            self._transfers.append(transfer)

    def _load(self, transfer: _Transfer) -> set[Block]:
        """Returns the blocks that have not come; something has been written there all the same."""
        invalid = set()
        for block, key in transfer.blocks:
            content = self._stored.get(key)
            if content is None or key in self._script.lost_keys or self._rng.random() < self._script.lost_block:
                content = [-1] * self._memory.block_size
                invalid.add(block)
            self._memory.write_block(*block, content)
        return invalid

    def _never(self) -> set[str]:
        return {transfer.request_id for transfer in self._transfers if transfer.due == math.inf}
