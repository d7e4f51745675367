"""Which layers share a block table: the grouping of a model's attention layers."""

from __future__ import annotations

from ksana.types.kv import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from ksana.types.model import ModelConfig


def kv_cache_specs(model: ModelConfig, block_size: int, dtype: str = "") -> list[KVCacheSpec]:
    """The KV cache spec of each layer, in layer order, for keys and values of ``dtype``, by default the model's."""
    windows = model.sliding_windows or (None,) * model.num_layers
    return [_spec(model, block_size, dtype or model.dtype, window) for window in windows]


def _spec(model: ModelConfig, block_size: int, dtype: str, window: int | None) -> KVCacheSpec:
    shape = (block_size, model.num_kv_heads, model.head_size, dtype)
    return FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window)


def group_layers(specs: list[KVCacheSpec]) -> list[tuple[KVCacheSpec, tuple[int, ...]]]:
    """Layers of equal spec belong together: each spec with its layers, full attention first."""
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(index)
    ordered = sorted(layers_of.items(), key=lambda item: not isinstance(item[0], FullAttentionSpec))
    return [(spec, tuple(layers)) for spec, layers in ordered]
