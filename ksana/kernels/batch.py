"""One step's batch, as kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ksana.types.kv import KVCacheConfig


@dataclass(slots=True)
class AttentionBatch:
    """Where the queries of a step stand, and where their keys and values are, for one KV cache group.

    The tokens of request r are rows [query_starts[r], query_starts[r + 1]) of the batch.

    Attributes:
        query_starts: int64 [R + 1].
        context_lens: int64 [R], tokens of each request that were in the cache before this step.
        block_tables: int64 [R, max blocks]. Entries past a request's last token, and those that its window has left
            behind, are valid ids of any block, and what that block holds may be NaN: they must not be read.
        slot_mapping: int64 [T], the slot (block id * block_size + offset) that each new token is written to.
        block_size: tokens per block.
        sliding_window: tokens that a query looks at, itself included; None for all.
    """

    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    block_size: int
    sliding_window: int | None


class KVCache:
    """The cache tensors, and which layer finds its own where.

    Args:
        config: the groups and their blocks.
        tensors: one for each layer, by its index: [blocks of the layer's group, ...], each block contiguous, the rest
            in the layout of the backend that allocated them.
    """

    def __init__(self, config: KVCacheConfig, tensors: dict[int, torch.Tensor]) -> None:
        self.config = config
        self.tensors = tensors
        self._place = {
            layer: (group_id, tensors[layer])
            for group_id, group in enumerate(config.groups)
            for layer in group.layer_indices
        }

    def layer(self, layer_index: int) -> tuple[int, torch.Tensor]:
        """(KV cache group, cache tensor) of a layer."""
        return self._place[layer_index]

    def group_tensors(self, group_id: int) -> list[torch.Tensor]:
        """The cache tensors of a group's layers, in layer order."""
        return [self.tensors[layer] for layer in self.config.groups[group_id].layer_indices]


class LayerTransfers(Protocol):
    """Who moves keys and values while a step goes from layer to layer; see ``WorkerConnector``."""

    def wait_for_layer_load(self, layer_index: int) -> None:
        """The layer is about to be computed: what it reads must be there."""
        ...

    def save_kv_layer(self, layer_index: int) -> None:
        """The layer has written its keys and values."""
        ...


@dataclass(slots=True)
class StepContext:
    """What every layer needs in a step, computed once for all of them.

    Attributes:
        rotary: (cos, sin) of the batch's positions, one pair for each kind of rotary embedding that the model's layers
            have; both [T, 1, head_size] in the model's dtype. The first half of ``sin`` is negated, so that
            ``x * cos + roll(x, head_size / 2) * sin`` is the rotation.
        attention: what the backend's metadata builder made of each group's batch.
        cache: keys and values.
        layer_transfers: must be told of every layer; None, and then layers may be computed all at once.
    """

    rotary: list[tuple[torch.Tensor, torch.Tensor]]
    attention: list[Any]
    cache: KVCache
    layer_transfers: LayerTransfers | None = None


@dataclass(slots=True)
class ModelInputs:
    """Input of a model's forward.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        output_rows: int64 [n], ascending: rows of the batch whose hidden states are wanted.
        embedding_rows: (first row in the batch, [n, hidden_size] rows) that replace token embeddings.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    output_rows: torch.Tensor
    embedding_rows: list[tuple[int, torch.Tensor]] = field(default_factory=list)
