"""Several connectors as one: the nearest of those that have most loads, and all save."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ksana.connectors.base import BlockTableView, KVConnector, SchedulerConnector, WorkerConnector
from ksana.types.kv_transfer import ConnectorMetadata, KVConnectorOutput
from ksana.types.request import Request
from ksana.types.step import BlockIds, SchedulerOutput

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache


@dataclass(slots=True)
class MultiMetadata(ConnectorMetadata):
    """What each connector asks of its worker side, in order; None for nothing."""

    parts: list[ConnectorMetadata | None]


class _Senders:
    """Which connectors still read the blocks of a request that are kept for them, by their places in the order.

    Both sides work under one lock, so that no connector can report a request before it is known that it will.
    """

    def __init__(self) -> None:
        self._reading: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def expect(self, request_id: str, answers: Iterable[bool]) -> bool:
        """Ask the connectors in order whether they will report the request; True if one will."""
        with self._lock:
            reading = {place for place, will_report in enumerate(answers) if will_report}
            if reading:
                self._reading.setdefault(request_id, set()).update(reading)
        return bool(reading)

    def collect(self, reports: Iterable[set[str]]) -> set[str]:
        """Take the connectors' reports in order; returns the requests that the last one has reported."""
        done = set()
        with self._lock:
            for place, request_ids in enumerate(reports):
                for request_id in request_ids & self._reading.keys():
                    reading = self._reading[request_id]
                    reading.discard(place)
                    if not reading:
                        del self._reading[request_id]
                        done.add(request_id)
        return done


class MultiSchedulerConnector(SchedulerConnector):
    """The scheduler sides of several connectors, nearest first."""

    def __init__(self, parts: Sequence[SchedulerConnector], block_size: int, senders: _Senders) -> None:
        self._parts = parts
        self._block_size = block_size
        self._senders = senders
        self._found_by: dict[str, SchedulerConnector] = {}
        self._last_loader: SchedulerConnector | None = None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._found_by.pop(request.request_id, None)
        most = min(request.num_tokens - 1, request.max_cached_tokens) - num_computed_tokens
        found, takes_steps = 0, False
        for part in self._parts:
            count, is_async = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if count is None:
                return None, is_async
            if count > found:
                found, takes_steps = count, is_async
                self._found_by[request.request_id] = part
            if found + self._block_size > most:
                break  # nobody has more
        return found, takes_steps

    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        loader = self._found_by.pop(request.request_id, None)
        self._last_loader = loader
        for part in self._parts:
            part.update_state_after_alloc(request, block_ids, num_external_tokens if part is loader else 0)

    def build_connector_meta(self, step: SchedulerOutput) -> MultiMetadata | None:
        parts = [part.build_connector_meta(step) for part in self._parts]
        return MultiMetadata(parts) if any(part is not None for part in parts) else None

    def tier_of(self, request: Request) -> str:
        loader = self._last_loader
        return self.tier if loader is None else loader.tier_of(request)

    def swap_out(self, request: Request, block_ids: BlockIds, num_tokens: int) -> bool:
        answers = (part.swap_out(request, block_ids, num_tokens) for part in self._parts)
        keeper = next((place for place, keeps in enumerate(answers) if keeps), None)
        if keeper is None:
            return False
        self._found_by.pop(request.request_id, None)
        for place, part in enumerate(self._parts):
            if place != keeper:
                part.request_preempted(request)
        self._senders.expect(request.request_id, (place == keeper for place in range(len(self._parts))))
        return True

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        self._found_by.pop(request.request_id, None)
        params: dict[str, Any] = {}

        def finish(part: SchedulerConnector) -> bool:
            must_stay, own_params = part.request_finished(request, block_ids)
            params.update(own_params or {})
            return must_stay

        must_stay = self._senders.expect(request.request_id, map(finish, self._parts))
        return must_stay, params or None

    def request_preempted(self, request: Request) -> None:
        self._found_by.pop(request.request_id, None)
        for part in self._parts:
            part.request_preempted(request)

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        for part in self._parts:
            part.on_worker_output(output)

    def has_pending(self) -> bool:
        return any(part.has_pending() for part in self._parts)

    def reset_cache(self) -> None:
        for part in self._parts:
            part.reset_cache()

    def shutdown(self) -> None:
        for part in self._parts:
            part.shutdown()


class MultiWorkerConnector(WorkerConnector):
    """The worker sides of several connectors, in the same order."""

    def __init__(self, parts: Sequence[WorkerConnector], senders: _Senders) -> None:
        self._parts = parts
        self._senders = senders

    @property
    def is_layerwise(self) -> bool:
        return any(part.is_layerwise for part in self._parts)

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        for part, own in self._addressed(meta):
            part.handle_preemptions(own)

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        for part, own in self._addressed(meta):
            part.start_load_kv(own)

    def wait_for_layer_load(self, layer_index: int) -> None:
        for part in self._parts:
            part.wait_for_layer_load(layer_index)

    def save_kv_layer(self, layer_index: int) -> None:
        for part in self._parts:
            part.save_kv_layer(layer_index)

    def wait_for_save(self) -> None:
        for part in self._parts:
            part.wait_for_save()

    def get_finished(self) -> tuple[set[str], set[str]]:
        received: set[str] = set()

        def report(part: WorkerConnector) -> set[str]:
            sent, own_received = part.get_finished()
            received.update(own_received)
            return sent

        return self._senders.collect(map(report, self._parts)), received

    def get_invalid_blocks(self) -> set[tuple[int, int]]:
        return set().union(*(part.get_invalid_blocks() for part in self._parts))

    def shutdown(self) -> None:
        for part in self._parts:
            part.shutdown()

    def _addressed(self, meta: ConnectorMetadata) -> list[tuple[WorkerConnector, ConnectorMetadata]]:
        assert isinstance(meta, MultiMetadata)
        return [(part, own) for part, own in zip(self._parts, meta.parts, strict=True) if own is not None]


class MultiConnector(KVConnector):
    """Combines connectors.

    Args:
        parts: nearest first: of two that have equally much, the earlier one loads.
    """

    def __init__(self, parts: Sequence[KVConnector]) -> None:
        self._parts = parts
        self._senders = _Senders()

    def create_scheduler(self, tables: BlockTableView) -> MultiSchedulerConnector:
        parts = [part.create_scheduler(tables) for part in self._parts]
        return MultiSchedulerConnector(parts, tables.block_size, self._senders)

    def create_worker(self, cache: KVCache) -> MultiWorkerConnector:
        return MultiWorkerConnector([part.create_worker(cache) for part in self._parts], self._senders)
