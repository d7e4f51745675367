"""Synchronous loads from the host's memory that the step overtakes: it computes the first layers meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ksana.connectors.cache_views import CacheViews
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_metadata import BlockList, Load
from ksana.connectors.transfer_threads import TransferThreads

_PRIORITY = 0
_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Layer:
    """What is loaded of a layer: rows of ``memory`` from slots of the store."""

    memory: np.ndarray
    block_ids: np.ndarray
    slots: np.ndarray
    is_there: threading.Event


class LayerwiseLoads:
    """Copies blocks layer after layer, in the order in which the model needs them.

    Args:
        store: whose blocks are pinned as long as they are loaded.
        on_lost: told of blocks that are not there, or could not be copied.
    """

    def __init__(
        self,
        store: MemoryStore,
        views: CacheViews,
        threads: TransferThreads,
        on_lost: Callable[[BlockList], None],
    ) -> None:
        self._store = store
        self._views = views
        self._threads = threads
        self._on_lost = on_lost
        self._awaited: list[tuple[int, _Layer]] = []

    @property
    def is_active(self) -> bool:
        """True while a step must go layer by layer."""
        return bool(self._awaited)

    def start(self, load: Load) -> None:
        """Begin a load. A block that is not pinned may go at any time, and counts as lost."""
        pinned = set(load.pinned)
        is_pinned = [key in pinned for key in load.blocks.keys]
        self._on_lost(load.blocks.select([not is_kept for is_kept in is_pinned]))
        blocks = load.blocks.select(is_pinned)
        slots = self._store.slots_of(blocks.keys)
        layers = []
        for group_id, places, block_ids in self._views.buffers(blocks).by_group():
            group_slots = np.array([slots[place] for place in places])
            for number, (index, memory) in enumerate(self._views.layers(group_id)):
                layers.append((index, _Layer(memory, block_ids, group_slots[:, number], threading.Event())))
        layers.sort(key=lambda layer: layer[0])
        self._awaited = sorted([*self._awaited, *layers], key=lambda layer: layer[0])
        num_left = _Countdown(len(layers), partial(self._store.unpin, load.pinned))
        for _, layer in layers:
            self._threads.submit(partial(self._copy, layer, blocks, num_left), priority=_PRIORITY)

    def wait(self, layer_index: int) -> None:
        """Wait for all layers up to this one.

        Raises:
            RuntimeError: copying does not end.
        """
        while self._awaited and self._awaited[0][0] <= layer_index:
            if not self._awaited[0][1].is_there.wait(_TIMEOUT_S):
                raise RuntimeError(f"blocks have not been loaded for {_TIMEOUT_S:.0f} s")
            del self._awaited[0]

    def _copy(self, layer: _Layer, blocks: BlockList, num_left: _Countdown) -> None:
        try:
            self._store.read_layer(layer.slots, layer.memory, layer.block_ids)
        except Exception:
            self._on_lost(blocks)
            raise
        finally:
            num_left.count()
            layer.is_there.set()


class _Countdown:
    """Calls a function when it has been counted down."""

    def __init__(self, count: int, at_zero: Callable[[], None]) -> None:
        self._count = count
        self._at_zero = at_zero
        self._lock = threading.Lock()
        if count == 0:
            at_zero()

    def count(self) -> None:
        """One less."""
        with self._lock:
            self._count -= 1
            is_over = self._count == 0
        if is_over:
            self._at_zero()
