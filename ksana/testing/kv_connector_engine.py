"""The part of an engine that a KV connector sees, without a model, for tests."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ksana.connectors.base import KVConnector
from ksana.kernels.base import torch_dtype
from ksana.kernels.batch import KVCache
from ksana.kv.hashing import BlockHasher
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec, cdiv
from ksana.types.kv_transfer import KVConnectorOutput
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams
from ksana.types.step import BlockIds, SchedulerOutput

DEADLINE_S = 20.0
"""For whatever a connector does on threads of its own."""


def make_connector_cache(
    windows: Sequence[int | None], *, dtype: str = "float32", num_blocks: int = 64, block_size: int = 4
) -> KVCacheConfig:
    """A cache of two layers for each entry: a window in tokens, or None for full attention, which must come first."""
    groups = []
    for index, window in enumerate(windows):
        spec: KVCacheSpec = FullAttentionSpec(block_size, 2, 8, dtype)
        if window is not None:
            spec = SlidingWindowSpec(block_size, 2, 8, dtype, window)
        groups.append(KVCacheGroup(spec, (index, index + len(windows)), num_blocks))
    return KVCacheConfig(tuple(groups), num_logical_blocks=0 if windows[0] is None else num_blocks)


class ConnectorEngine:
    """Calls both sides of a connector as the core does, and writes into the cache what depends on the tokens alone.

    A request's table is allocated at once, a hole where no window reaches. Blocks that the connector is still at are
    kept; all others are given to the next request.

    Args:
        connector: under test.
        kv: see :func:`make_connector_cache`.

    Attributes:
        connector, kv: the arguments.
        sent, received: requests in the order in which the worker side has reported them.
        invalid: blocks that it has reported, since the last :meth:`admit`.
    """

    def __init__(self, connector: KVConnector, kv: KVCacheConfig) -> None:
        self.connector = connector
        self.kv = kv
        self.block_size = kv.block_size
        tensors = {}
        for group in kv.groups:
            shape = (group.num_blocks, self.block_size, 2 * group.spec.num_kv_heads, group.spec.head_size)
            for layer in group.layer_indices:
                tensors[layer] = torch.zeros(shape, dtype=torch_dtype(group.spec.dtype))
        self.cache = KVCache(kv, tensors)
        self._last_layer = max(tensors)
        self.scheduler = connector.create_scheduler(self)
        self.worker = connector.create_worker(self.cache)
        self.sent: list[str] = []
        self.received: list[str] = []
        self.invalid: set[tuple[int, int]] = set()
        self._bytes = {layer: tensor.flatten(2).view(torch.uint8).numpy() for layer, tensor in tensors.items()}
        self._free = [list(range(1, group.num_blocks)) for group in kv.groups]
        self._tables: dict[str, BlockIds] = {}
        self._kept: set[str] = set()
        self._found_async: set[str] = set()
        self._loading: set[str] = set()
        self._ended_loading: set[str] = set()
        self._hasher = BlockHasher(self.block_size, "ksana")
        self._numbers = itertools.count()

    # -- requests ----------------------------------------------------------------------------------------------

    def request(self, tokens: Sequence[int], *, cache_salt: str = "") -> Request:
        """A request that waits."""
        name = f"request-{next(self._numbers)}"
        request = Request(name, list(tokens), SamplingParams(), max_total_tokens=10_000, cache_salt=cache_salt)
        self._hasher.extend(request)
        return request

    def lookup(self, request: Request, num_computed_tokens: int = 0) -> int:
        """Tokens that the connector offers; waits until it knows."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
            if found is not None:
                break
            assert time.monotonic() < deadline, "a lookup is never answered"
            self.step()
        (self._found_async.add if is_async else self._found_async.discard)(request.request_id)
        return found

    def admit(self, request: Request, num_external_tokens: int = 0, num_computed_tokens: int = 0) -> None:
        """Give a request blocks, of which the first hold ``num_computed_tokens`` tokens already."""
        end = num_computed_tokens + num_external_tokens
        num_blocks = cdiv(request.num_tokens, self.block_size)
        tables = []
        for group, free in zip(self.kv.groups, self._free, strict=True):
            first = 0 if group.sliding_window is None else max(0, end - group.sliding_window + 1) // self.block_size
            assert num_blocks - first <= len(free), "the test has too many requests for its cache"
            tables.append([0] * first + [free.pop(0) for _ in range(num_blocks - first)])
        self._tables[request.request_id] = tuple(tables)
        self.invalid = set()
        self._write(request, 0, num_computed_tokens)
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        if num_external_tokens and request.request_id in self._found_async:
            self._loading.add(request.request_id)
        self.scheduler.update_state_after_alloc(request, self.kept_block_ids(request.request_id), num_external_tokens)

    def wait_for_load(self, request: Request) -> None:
        """Until what was asked for has come or failed."""
        self.step()
        self.wait(lambda: request.request_id not in self._loading, f"{request.request_id} is never received")

    def is_loading(self, request: Request) -> bool:
        """True while a load is under way that lets others go on."""
        return request.request_id in self._loading

    def load(self, request: Request, num_computed_tokens: int = 0) -> int:
        """Look up, admit and load; returns the tokens that came, or that the connector says came."""
        num_found = self.lookup(request, num_computed_tokens)
        self.admit(request, num_found, num_computed_tokens)
        self.wait_for_load(request)
        request.num_computed_tokens = num_computed_tokens + num_found
        return num_found

    def run(self, request: Request) -> int:
        """The whole life of a request, until what it had is stored; returns the tokens that were loaded."""
        num_loaded = self.load(request)
        self.step(request)
        self.finish(request)
        self.settle()
        return num_loaded

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> bool:
        """End a request; its blocks go as soon as they may. Returns whether the connector keeps them."""
        request_id, has_blocks = request.request_id, request.request_id in self._tables
        request.status = status
        block_ids = self.kept_block_ids(request_id) if has_blocks else tuple([] for _ in self.kv.groups)
        must_stay, _ = self.scheduler.request_finished(request, block_ids)
        if request_id in self._loading:
            self._ended_loading.add(request_id)
        elif must_stay and has_blocks:
            self._kept.add(request_id)
        elif has_blocks:
            self._give_back(request_id)
        return must_stay

    def preempt(self, request: Request) -> None:
        """Take a request's blocks; the next step may write there."""
        self.scheduler.request_preempted(request)
        self._give_back(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def swap_out(self, request: Request) -> bool:
        """Have a request's computed tokens kept elsewhere; its blocks go as soon as they may."""
        ids = self.kept_block_ids(request.request_id)
        if not self.scheduler.swap_out(request, ids, request.num_computed_tokens):
            return False
        self._kept.add(request.request_id)
        request.status = RequestStatus.SWAPPED
        request.num_computed_tokens = 0
        return True

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self, *requests: Request, is_lost: bool = False, raises: bool = False, overwrites: bool = False) -> None:
        """A step in which requests compute all tokens that they have left.

        Args:
            is_lost: it never reaches the worker.
            raises: it has begun, and computing it raises.
            overwrites: others write to all free blocks.
        """
        counts = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        meta = self.scheduler.build_connector_meta(SchedulerOutput(num_scheduled_tokens=counts))
        if is_lost:
            return
        if meta is not None:
            self.worker.handle_preemptions(meta)
            self.worker.start_load_kv(meta)
        if raises:
            self.worker.wait_for_layer_load(self._last_layer)
            self.worker.wait_for_save()
            return
        if overwrites:
            self.overwrite_free_blocks()
        self._compute(requests)
        sent, received = self.worker.get_finished()
        output = KVConnectorOutput(sent, received, self.worker.get_invalid_blocks())
        self.sent += sorted(sent)
        self.received += sorted(received)
        self.invalid |= output.invalid_blocks
        for request_id in (received & self._ended_loading) | (sent & self._kept):
            self._give_back(request_id)
        self._loading -= received
        self._ended_loading -= received
        self._kept -= sent
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            self._hasher.extend(request)
        self.scheduler.on_worker_output(output)

    def wait(self, is_so: Callable[[], bool], complaint: str) -> None:
        """Steps without tokens until something is so. Raises AssertionError if it never is."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, complaint
            time.sleep(0.001)
            self.step()

    def settle(self) -> None:
        """Let the connector end all that it has begun."""
        self.wait(lambda: not self.scheduler.has_pending(), "the connector never says that nothing is pending")
        assert not self._kept | self._loading, f"never reported: {self._kept | self._loading}"

    def close(self) -> None:
        """The engine stops."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    # -- blocks ------------------------------------------------------------------------------------------------

    def kept_block_ids(self, request_id: str, first_index: int = 0) -> BlockIds:
        """What a KV cache manager answers: here no window gives anything back."""
        return tuple(ids[first_index:] for ids in self._tables[request_id])

    def wrong_blocks(self, request: Request, num_tokens: int) -> set[tuple[int, int]]:
        """(group, block id) of blocks for the first tokens that do not hold what they should."""
        wrong = set()
        for group_id, index, block_id in self._blocks_of(request, num_tokens):
            count = min(self.block_size, num_tokens - index * self.block_size)
            for layer in self.kv.groups[group_id].layer_indices:
                expected = self._content(request, layer, index * self.block_size, count)
                if not np.array_equal(self._bytes[layer][block_id, :count], expected):
                    wrong.add((group_id, block_id))
        return wrong

    def overwrite_free_blocks(self) -> None:
        """What other requests may do with blocks that nobody holds."""
        for group, free in zip(self.kv.groups, self._free, strict=True):
            for layer in group.layer_indices:
                self._bytes[layer][free] = 0xFF

    def written_free_blocks(self) -> set[tuple[int, int]]:
        """(group, block id) of free blocks that do not hold what :meth:`overwrite_free_blocks` has written."""
        return {
            (group_id, block_id)
            for group_id, free in enumerate(self._free)
            for layer in self.kv.groups[group_id].layer_indices
            for block_id in free
            if (self._bytes[layer][block_id] != 0xFF).any()
        }

    def _compute(self, requests: Sequence[Request]) -> None:
        layers = [layer for group in self.kv.groups for layer in group.layer_indices]
        if self.worker.is_layerwise:
            for layer in sorted(layers):
                self.worker.wait_for_layer_load(layer)
                self._compute_layer(requests, layer)
                self.worker.save_kv_layer(layer)
        else:
            self.worker.wait_for_layer_load(self._last_layer)
            for layer in layers:
                self._compute_layer(requests, layer)
        self.worker.wait_for_save()

    def _compute_layer(self, requests: Sequence[Request], layer: int) -> None:
        for request in requests:
            self._write(request, request.num_computed_tokens, request.num_tokens, layer)

    def _write(self, request: Request, start: int, end: int, only_layer: int | None = None) -> None:
        for group_id, index, block_id in self._blocks_of(request, end):
            first, last = max(start, index * self.block_size), min(end, (index + 1) * self.block_size)
            for layer in self.kv.groups[group_id].layer_indices:
                if first < last and only_layer in (None, layer):
                    place = slice(first - index * self.block_size, last - index * self.block_size)
                    self._bytes[layer][block_id, place] = self._content(request, layer, first, last - first)

    def _blocks_of(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]]:
        """(group, place in the table, block id) of a request's blocks for its first tokens, but for holes."""
        num_blocks = cdiv(num_tokens, self.block_size)
        return [
            (group_id, index, block_id)
            for group_id, ids in enumerate(self._tables[request.request_id])
            for index, block_id in enumerate(ids[:num_blocks])
            if block_id
        ]

    def _content(self, request: Request, layer: int, start: int, count: int) -> np.ndarray:
        """Bytes of ``count`` tokens of a layer, [count, bytes]: other ones for other tokens before them."""
        size = self._bytes[layer].shape[2]
        rows = []
        for position in range(start, start + count):
            text = f"{request.cache_salt}/{layer}/{request.all_token_ids[: position + 1]}"
            rows.append(np.frombuffer(hashlib.shake_128(text.encode()).digest(size), dtype=np.uint8))
        return np.stack(rows)

    def _give_back(self, request_id: str) -> None:
        for free, ids in zip(self._free, self._tables.pop(request_id), strict=True):
            free.extend(block_id for block_id in ids if block_id)
