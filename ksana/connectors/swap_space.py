"""Where the blocks of a request lie that has been swapped out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_metadata import BlockList
from ksana.types.kv import KVCacheConfig, cdiv
from ksana.types.step import BlockIds


@dataclass(frozen=True, slots=True)
class _Swapped:
    number: int
    num_tokens: int
    keys: list[str]


class SwapSpace:
    """Reserved places in a memory store, under keys that belong to one request each.

    Args:
        store: with everything else that is kept in the host's memory; swapped requests displace cached prefixes.
        kv: blocks and groups of the cache.
    """

    def __init__(self, store: MemoryStore, kv: KVCacheConfig) -> None:
        self._store = store
        self._block_size = kv.block_size
        self._num_layers = [len(group.layer_indices) for group in kv.groups]
        self._swapped: dict[str, _Swapped] = {}
        self._numbers = itertools.count()  # a place of last time may still be read when a request is swapped out again

    def reserve(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> BlockList | None:
        """Make room for the blocks of a request's first tokens. None, with nothing changed, if there is none."""
        number = next(self._numbers)
        blocks = self._blocks(number, block_ids, 0, num_tokens)
        if not self._store.reserve(blocks.keys, [self._num_layers[group_id] for group_id in blocks.group_ids]):
            return None
        self._swapped[request_id] = _Swapped(number, num_tokens, blocks.keys)
        return blocks

    def num_tokens(self, request_id: str) -> int:
        """Tokens that are kept of a request; 0 if it has not been swapped out."""
        swapped = self._swapped.get(request_id)
        return 0 if swapped is None else swapped.num_tokens

    def blocks_for(self, request_id: str, block_ids: BlockIds, num_computed_tokens: int) -> BlockList:
        """What is to be copied back into a request's new blocks, behind tokens that are in the cache."""
        swapped = self._swapped[request_id]
        return self._blocks(swapped.number, block_ids, num_computed_tokens, swapped.num_tokens)

    def release(self, request_id: str) -> None:
        """The request is back, or has ended. Does nothing if it has not been swapped out."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self._store.discard(swapped.keys)

    def release_all(self) -> None:
        """The engine stops."""
        for request_id in list(self._swapped):
            self.release(request_id)

    def _blocks(self, number: int, block_ids: BlockIds, first_token: int, end_token: int) -> BlockList:
        first, end = first_token // self._block_size, cdiv(end_token, self._block_size)
        blocks = BlockList()
        for group_id, ids in enumerate(block_ids):
            for index, block_id in enumerate(ids[first:end], first):
                if block_id:
                    blocks.append(f"swap-{number}-{group_id}-{index}", group_id, block_id)
        return blocks
