"""Which layers share a block table: the grouping of a model's attention layers."""

from __future__ import annotations

from ksana.types.kv import FullAttentionSpec, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from ksana.types.model import ModelConfig


def kv_cache_specs(model: ModelConfig, block_size: int, dtype: str = "") -> list[KVCacheSpec]:
    """The KV cache spec of each layer, in layer order, for keys and values of ``dtype``, by default the model's."""
    windows = model.sliding_windows or (None,) * model.num_layers
    return [_spec(model, block_size, dtype or model.dtype, window) for window in windows]


def _spec(model: ModelConfig, block_size: int, dtype: str, window: int | None) -> KVCacheSpec:
    shape = (block_size, model.num_kv_heads, model.head_size, dtype)
    return FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window)


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Put layers of equal spec into groups of equal size, full attention first.

    All groups draw from one pool and lay the j-th of their layers into the j-th cache tensor, so a block wastes memory
    in every tensor that its group has no layer for. The group size is therefore that of the rarest kind of layer, and
    commoner kinds are split: 5 sliding layers for 1 full one become 5 groups beside 1.
    """
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(index)
    size = min(len(layers) for layers in layers_of.values())
    ordered = sorted(layers_of.items(), key=lambda item: not isinstance(item[0], FullAttentionSpec))
    return tuple(
        KVCacheGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in ordered
        for start in range(0, len(layers), size)
    )
