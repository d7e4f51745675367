"""The cache's tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from ksana.connectors.store_metadata import BlockList
from ksana.errors import UsageError

if TYPE_CHECKING:
    from ksana.kernels.batch import KVCache

Layers = Sequence[np.ndarray]
"""Of one KV cache group: uint8 [blocks, bytes of a block] each."""


class CacheBlocks(Sequence[list[np.ndarray]]):
    """The memory of some blocks, as stores take it: for each block one flat array for each layer of its group.

    Who copies may do so layer by layer instead, all blocks at once: an interpreter that is busy elsewhere is then asked
    a hundred times less often.

    Args:
        groups: by KV cache group.
        group_ids, block_ids: of the blocks.
    """

    def __init__(self, groups: Sequence[Layers], group_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self._groups = groups
        self._group_ids = group_ids
        self._block_ids = block_ids

    def __len__(self) -> int:
        return len(self._block_ids)

    @overload
    def __getitem__(self, place: int) -> list[np.ndarray]: ...

    @overload
    def __getitem__(self, place: slice) -> CacheBlocks: ...

    def __getitem__(self, place: int | slice) -> list[np.ndarray] | CacheBlocks:
        if isinstance(place, slice):
            return CacheBlocks(self._groups, self._group_ids[place], self._block_ids[place])
        block_id = self._block_ids[place]
        return [layer[block_id] for layer in self._groups[self._group_ids[place]]]

    def by_group(self) -> Iterator[tuple[int, list[int], np.ndarray]]:
        """For each group that has some of the blocks: its id, the blocks' places here, and their ids, int64."""
        for group_id in sorted(set(self._group_ids)):
            places = [place for place, group in enumerate(self._group_ids) if group == group_id]
            yield group_id, places, np.array([self._block_ids[place] for place in places])

    def layers(self, group_id: int) -> Layers:
        """The memory of all blocks of a group."""
        return self._groups[group_id]


class CacheViews:
    """Every block's memory.

    Raises:
        UsageError: the cache is not in the host's memory.
    """

    def __init__(self, cache: KVCache) -> None:
        import torch

        self._groups: list[Layers] = []
        self._layer_indices = [group.layer_indices for group in cache.config.groups]
        for group_id in range(len(cache.config.groups)):
            tensors = cache.group_tensors(group_id)
            if any(tensor.device.type != "cpu" for tensor in tensors):
                raise UsageError(f"this KV connector needs a cache in the host's memory, not on {tensors[0].device}")
            # A dtype that numpy does not know is as many bytes as any other.
            self._groups.append([t.view(t.shape[0], -1).view(torch.uint8).numpy() for t in tensors])

    def buffers(self, blocks: BlockList) -> CacheBlocks:
        """The memory of blocks."""
        return CacheBlocks(self._groups, blocks.group_ids, blocks.block_ids)

    def layers(self, group_id: int) -> list[tuple[int, np.ndarray]]:
        """The index in the model and the memory of each layer of a group."""
        return list(zip(self._layer_indices[group_id], self._groups[group_id], strict=True))

    def copies(self, blocks: BlockList) -> CacheBlocks:
        """The same content in memory of its own."""
        groups: list[Layers] = [[] for _ in self._groups]
        copied_ids = [0] * len(blocks)
        for group_id, places, ids in self.buffers(blocks).by_group():
            groups[group_id] = [layer[ids] for layer in self._groups[group_id]]
            for copied_id, place in enumerate(places):
                copied_ids[place] = copied_id
        return CacheBlocks(groups, blocks.group_ids, copied_ids)
