"""The side of a block store's connector that decides what is loaded and saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ksana.connectors.base import BlockTableView, SchedulerConnector
from ksana.connectors.block_store import BlockStore
from ksana.connectors.prefix_lookup import PrefixLookup
from ksana.connectors.store_metadata import BlockList, Load, Save, StoreMetadata
from ksana.connectors.swap_space import SwapSpace
from ksana.connectors.transfers import Transfers
from ksana.types.kv import KVCacheConfig
from ksana.types.kv_transfer import KVConnectorOutput
from ksana.types.request import Request
from ksana.types.step import BlockIds, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """What a connector uses its store for.

    Attributes:
        tier: where the store lies.
        loads: prefixes that it has are loaded.
        saves: full blocks are saved when they have been computed.
        max_sync_bytes: a load up to this size is awaited by the step; a larger one lets others go on meanwhile.
    """

    tier: str
    loads: bool = True
    saves: bool = True
    max_sync_bytes: int = 0


@dataclass(slots=True)
class _Running:
    """A request with blocks.

    Attributes:
        num_saved: blocks from the start for which a save has been asked for.
        next_save: computed tokens at which there is something to save again.
    """

    request: Request
    num_saved: int
    next_save: int


class StoreSchedulerConnector(SchedulerConnector):
    """Finds stored prefixes by their content, and has blocks saved when they are full and committed.

    A step costs a comparison for each scheduled request; only blocks that have become full are looked at.

    Args:
        store: where the blocks are.
        lookup: how long a stored prefix is.
        kv: blocks and groups of the cache.
        tables: of the running requests.
        transfers: shared with the worker side.
        policy: what is loaded and saved; nothing of it without prefix caching.
        swap: room for requests that give up their blocks; None if there is none.
    """

    def __init__(
        self,
        store: BlockStore,
        lookup: PrefixLookup,
        kv: KVCacheConfig,
        tables: BlockTableView,
        transfers: Transfers,
        policy: StorePolicy,
        swap: SwapSpace | None = None,
    ) -> None:
        self.tier = policy.tier
        self._store = store
        self._lookup = lookup
        self._tables = tables
        self._transfers = transfers
        self._policy = policy
        self._swap = swap
        self._block_size = kv.block_size
        self._block_bytes = sum(group.spec.bytes_per_block * len(group.layer_indices) for group in kv.groups)
        self._num_found_behind: dict[str, int] = {}  # by request, the computed tokens of its last lookup
        self._admitted: list[Request] = []  # in the step that is being planned
        self._running: dict[str, _Running] = {}
        self._loading: set[str] = set()
        self._next = StoreMetadata()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        if self._swap is not None and (num_kept := self._swap.num_tokens(request_id)):
            if self._transfers.is_saving(request_id):
                return None, True  # on its way out
            self._num_found_behind[request_id] = num_computed_tokens
            return max(num_kept - num_computed_tokens, 0), True
        if not self._policy.loads:
            return 0, False
        size = self._block_size
        first = num_computed_tokens // size
        end = min((request.num_tokens - 1) // size, request.max_cached_tokens // size, len(request.block_hashes))
        count = self._lookup.num_blocks(request.block_hashes, first, end) if first < end else 0
        if not count:
            return count, False
        self._num_found_behind[request_id] = num_computed_tokens
        return count * size, count * self._block_bytes > self._policy.max_sync_bytes

    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        request_id = request.request_id
        start = self._num_found_behind.pop(request_id, 0)
        if num_external_tokens:
            self._load(request, block_ids, start, num_external_tokens)
        elif self._swap is not None:
            self._swap.release(request_id)
        if self._policy.saves:
            self._admitted.append(request)

    def build_connector_meta(self, step: SchedulerOutput) -> StoreMetadata | None:
        running = self._running
        for request_id in step.num_scheduled_tokens:
            entry = running.get(request_id)
            if entry is not None and entry.request.num_computed_tokens >= entry.next_save:
                self._save_full_blocks(entry)
        for request in self._admitted:
            # What it begins with may be on its way here in this step, and not come: a later step shows that it did.
            self._running[request.request_id] = _Running(request, 0, request.num_computed_tokens + 1)
        self._admitted.clear()
        meta = self._next
        if meta.is_empty and not self._transfers.is_pending and not self._loading:
            return None
        self._next = StoreMetadata()
        self._transfers.hand_over(meta)
        return meta

    def swap_out(self, request: Request, block_ids: BlockIds, num_tokens: int) -> bool:
        if self._swap is None:
            return False
        request_id = request.request_id
        blocks = self._swap.reserve(request_id, block_ids, num_tokens)
        if blocks is None:
            return False
        self._stop_tracking(request_id)
        self._save(Save(request_id, blocks, is_swap=True))
        self._transfers.await_saves(request_id)
        return True

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        entry = self._running.get(request_id)
        if entry is not None:
            if request.num_computed_tokens >= entry.next_save:
                self._save_full_blocks(entry)
            self._mark_used(request, entry.num_saved)
        self._stop_tracking(request_id)
        self._drop_load_in_step(request_id)
        if self._swap is not None:
            self._swap.release(request_id)
        return self._transfers.await_saves(request_id), None

    def request_preempted(self, request: Request) -> None:
        request_id = request.request_id
        self._stop_tracking(request_id)
        self._drop_load_in_step(request_id)
        if self._swap is not None:
            self._swap.release(request_id)
        for save in [save for save in self._next.saves if save.request_id == request_id]:
            self._next.saves.remove(save)
            self._transfers.end_save(request_id)
        self._next.preempted.add(request_id)

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_receiving & self._loading:
            self._loading.remove(request_id)
            if self._swap is not None:
                self._swap.release(request_id)

    def has_pending(self) -> bool:
        return bool(self._loading or self._next.loads or self._next.preempted) or self._transfers.is_pending

    def reset_cache(self) -> None:
        self._store.clear()

    def shutdown(self) -> None:
        for load in self._next.loads:
            self._store.unpin(load.pinned)
        self._next = StoreMetadata()
        if self._swap is not None:
            self._swap.release_all()

    def _load(self, request: Request, block_ids: BlockIds, start: int, num_tokens: int) -> None:
        """Have the blocks of ``num_tokens`` tokens behind the first ``start`` loaded."""
        request_id = request.request_id
        if self._swap is not None and self._swap.num_tokens(request_id):
            load = Load(request_id, self._swap.blocks_for(request_id, block_ids, start), is_async=True)
        else:
            first, end = start // self._block_size, (start + num_tokens) // self._block_size
            blocks = self._blocks(request, tuple(ids[first:end] for ids in block_ids), first, end)
            is_async = (end - first) * self._block_bytes > self._policy.max_sync_bytes
            load = Load(request_id, blocks, is_async, self._store.pin(blocks.keys))
        if load.is_async:
            self._loading.add(request_id)
        self._next.loads.append(load)

    def _drop_load_in_step(self, request_id: str) -> None:
        """The blocks of a request go: nothing may be loaded there in this step. What takes longer keeps its blocks."""
        dropped = [load for load in self._next.loads if load.request_id == request_id and not load.is_async]
        for load in dropped:
            self._next.loads.remove(load)
            self._store.unpin(load.pinned)

    def _save_full_blocks(self, entry: _Running) -> None:
        """Have those of a request's blocks saved that have become full."""
        request, first = entry.request, entry.num_saved
        num_full = request.num_computed_tokens // self._block_size
        block_ids = self._tables.kept_block_ids(request.request_id, first)
        blocks = self._blocks(request, block_ids, first, num_full)
        entry.num_saved = num_full
        entry.next_save = (num_full + 1) * self._block_size
        if len(blocks):
            self._save(Save(request.request_id, blocks))

    def _save(self, save: Save) -> None:
        self._transfers.begin_save(save.request_id)
        self._next.saves.append(save)

    def _blocks(self, request: Request, block_ids: BlockIds, first: int, end: int) -> BlockList:
        """Blocks ``first`` to ``end`` of a request, but for holes; ``block_ids`` begins with the first of them."""
        blocks = BlockList()
        prefixes = self._lookup.prefixes
        for block_hash, *ids in zip(request.block_hashes[first:end], *block_ids, strict=False):
            name = block_hash.hex()
            for group_id, block_id in enumerate(ids):
                if block_id:
                    blocks.append(prefixes[group_id] + name, group_id, block_id)
        return blocks

    def _mark_used(self, request: Request, num_blocks: int) -> None:
        """What a request began with is worth more than what it ended with, for which all before it is needed."""
        for block_hash in reversed(request.block_hashes[:num_blocks]):
            self._next.used_keys.extend(prefix + block_hash.hex() for prefix in self._lookup.prefixes)

    def _stop_tracking(self, request_id: str) -> None:
        self._num_found_behind.pop(request_id, None)
        if self._running.pop(request_id, None) is None:
            self._admitted = [request for request in self._admitted if request.request_id != request_id]
