"""The interface of a KV connector: a scheduler side that decides, and a worker side that moves bytes.

The two sides are made by a :class:`KVConnector`, and talk through the step: the scheduler side describes what is to
move in a :class:`ConnectorMetadata`, the worker side answers with a :class:`KVConnectorOutput`. The scheduler side
never sees a tensor; the worker side never sees a request.

The life of a load: ``get_num_new_matched_tokens`` (any number of times), blocks are allocated,
``update_state_after_alloc``, ``build_connector_meta`` of the same step; on the worker ``start_load_kv``, then either
``wait_for_layer_load`` in that very step (a synchronous load), or, some steps later, ``get_finished`` (an asynchronous
one; the request waits in WAITING_FOR_REMOTE_KV, and its blocks are found by nobody until then).

The life of a save: ``build_connector_meta`` names blocks that earlier steps have filled; the worker reads them while
later steps compute. While a request runs its blocks stay; when it ends, ``request_finished`` may ask to keep them until
the worker reports the request in ``finished_sending``; when it is preempted, ``handle_preemptions`` ends all reading
first. Blocks of a sliding window are given back while the request runs: they may be read until the end of the next
``start_load_kv``, no longer.

If computing a step raises, its requests end and their blocks get other owners. So the worker still calls
``wait_for_layer_load`` for the last layer, and ``wait_for_save``. Such a step takes the one behind it along, which
never reaches the worker. Its requests end as well, but what waits for transfers that it described still waits, so these
are to be made in the next step. An asynchronous load that was announced to the scheduler side is always reported,
whatever has become of its request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ksana.types.kv_transfer import ConnectorMetadata, KVConnectorOutput
from ksana.types.request import Request
from ksana.types.step import BlockIds, SchedulerOutput

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache


class SchedulerConnector(ABC):
    """Decides on the engine's thread what is loaded and saved. No call may block, nor touch the network.

    Attributes:
        tier: where its blocks lie, for those who count hits: ``host``, ``disk``, ``remote``.
    """

    tier: str = "remote"

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the first ``num_computed_tokens`` could be loaded. Free of side effects.

        It is called for a waiting request in every step until it is admitted, so nothing may be pinned here.

        Args:
            num_computed_tokens: tokens found in this engine's cache, a multiple of the block size.

        Returns:
            The number, a multiple of the block size (except for what was swapped out) that leaves a token of the
            request to compute, 0 for nothing, None for "not known yet, ask in a later step"; and whether the load is
            asynchronous.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """The request has got blocks; ``num_external_tokens`` of its tokens are to be loaded, 0 for none.

        Args:
            block_ids: its whole block table, the cached prefix included; 0 is a hole. What is to be loaded are the
                blocks of the ``num_external_tokens`` behind those that were passed to
                :meth:`get_num_new_matched_tokens`, except holes.

        A request that was never named here is none of the connector's: beam searches are computed without it.
        """

    @abstractmethod
    def build_connector_meta(self, step: SchedulerOutput) -> ConnectorMetadata | None:
        """What the worker side shall do in this step; None for nothing. Resets what was collected for it.

        Called once for every step, after it is planned and before its tokens are computed.
        """

    def tier_of(self, request: Request) -> str:
        """Where the blocks lie that are loaded for the request; called right after :meth:`update_state_after_alloc`."""
        del request
        return self.tier

    def swap_out(self, request: Request, block_ids: BlockIds, num_tokens: int) -> bool:
        """Keep a request's first ``num_tokens`` tokens while it has no blocks; they need not fill the last block.

        Only the host blocks do this. From then on :meth:`get_num_new_matched_tokens` offers these tokens, the last of
        them too, until the request has got blocks again or has ended. The blocks must stay as they are until
        ``finished_sending`` names the request.

        Returns:
            False, with nothing changed, if there is no room.
        """
        del request, block_ids, num_tokens
        return False

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended, or is ending before its blocks are freed. Called exactly once, also after an abort.

        Args:
            block_ids: its blocks as they stand; empty lists if it has none.

        Returns:
            Whether its blocks must stay until ``finished_sending`` names it (the core frees them after a deadline all
            the same), and parameters of the transfer for the request's output, or None.
        """
        del request, block_ids
        return False, None

    def request_preempted(self, request: Request) -> None:
        """The request is about to lose its blocks, and to be computed again later. Forget what refers to them.

        Also when a load or a swap of it has taken too long, and when blocks of a request that has ended are kept no
        longer: what would be read there from then on is another's. A load that is still under way is reported as ever,
        though the request may have got other blocks meanwhile.
        """

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """The worker side's answer to an earlier step."""

    def has_pending(self) -> bool:
        """True while the worker must be asked although no tokens are to be computed: something is under way."""
        return False

    def reset_cache(self) -> None:
        """Forget all stored content."""

    def shutdown(self) -> None:
        """The engine stops. Give back what is held; at most a few seconds."""


class WorkerConnector(ABC):
    """Moves blocks on the thread that computes, and on threads of its own.

    In a step the worker calls, in this order: ``handle_preemptions``, ``start_load_kv`` (between the two it makes the
    step's block copies, whose sources may be free by now and be loaded into); for each layer, if ``is_layerwise``,
    ``wait_for_layer_load`` before it and ``save_kv_layer`` after it, otherwise ``wait_for_layer_load`` of the last
    layer before all of them; ``wait_for_save``; ``get_finished`` and ``get_invalid_blocks``.
    """

    @property
    def is_layerwise(self) -> bool:
        """True if the present step must compute layer by layer, because something is loaded or saved that way."""
        return False

    @abstractmethod
    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        """Begin what ``meta`` asks for, loads and saves alike. Must not wait for them."""

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        """Blocks of preempted requests are about to be written by others: end all reading from them. May wait."""

    def wait_for_layer_load(self, layer_index: int) -> None:
        """Wait until what the present step loads synchronously is there, for the layers up to this one.

        Behind the last layer nothing writes for the step any more, whether all has come or not.
        """

    def save_kv_layer(self, layer_index: int) -> None:
        """The step has written keys and values of this layer."""

    def wait_for_save(self) -> None:
        """The step has computed all layers: wait for what must be saved before any later step writes."""

    @abstractmethod
    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests that have finished sending, and that have finished receiving, since the last call."""

    def get_invalid_blocks(self) -> set[tuple[int, int]]:
        """(KV cache group, block id) of blocks whose load has failed since the last call."""
        return set()

    def shutdown(self) -> None:
        """The engine stops: end the threads; at most a few seconds."""


class BlockTableView(Protocol):
    """What a connector sees of the KV cache manager."""

    block_size: int

    def kept_block_ids(self, request_id: str, first_index: int = 0) -> BlockIds:
        """Entries of a request's block table from ``first_index`` on, one list per group; 0 is a hole.

        Blocks of a sliding window that the request has given back are among them if they are still what they were.
        """


class KVConnector(ABC):
    """Makes the two sides. In one process both are made of the same object, and may share what they like."""

    @abstractmethod
    def create_scheduler(self, tables: BlockTableView) -> SchedulerConnector:
        """The side that decides; ``tables`` are those of the requests that run."""

    @abstractmethod
    def create_worker(self, cache: KVCache) -> WorkerConnector:
        """The side that moves, for the tensors in ``cache``."""
