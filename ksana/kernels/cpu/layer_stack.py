"""What every step says again of the layers that it computes, laid out once for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ksana.kernels.batch import KVCache, StepContext
from ksana.kernels.weights import DecoderLayerWeights

Pointers = ctypes.Array[ctypes.c_void_p]


class LayerStack:
    """Decoder layers and their caches.

    A step's few Python statements find the processor's caches swept by the kernels: each costs several times what it
    costs in a loop of its own, so that thirty layers are worth remembering.

    Args:
        layers: packed by the native backend; must not change any more.
        cache: that the layers read and write.

    Attributes:
        layer_pointers, cache_pointers: one for each layer.
    """

    def __init__(self, layers: Sequence[DecoderLayerWeights], cache: KVCache) -> None:
        self._layers, self._cache = layers, cache
        places = [cache.layer(layer.attention.layer_index) for layer in layers]
        self.layer_pointers = _pointers([ctypes.addressof(layer.packed.struct) for layer in layers])
        self.cache_pointers = _pointers([tensor.data_ptr() for _, tensor in places])
        kinds = [
            (group_id, tensor.dtype, layer.attention.rotary_index)
            for layer, (group_id, tensor) in zip(layers, places, strict=True)
        ]
        self._kinds = list(dict.fromkeys(kinds))
        self._kind_of_layer = [self._kinds.index(kind) for kind in kinds]

    def __len__(self) -> int:
        return len(self._kind_of_layer)

    def is_of(self, layers: Sequence[DecoderLayerWeights], cache: KVCache) -> bool:
        """Whether it was made from these very objects."""
        return self._layers is layers and self._cache is cache

    def step_pointers(self, context: StepContext) -> Pointers:
        """The step's structure of each layer. They live as long as the context's metadata."""
        addresses = [
            ctypes.addressof(context.attention[group_id].struct(dtype, context, rotary_index))
            for group_id, dtype, rotary_index in self._kinds
        ]
        return _pointers([addresses[kind] for kind in self._kind_of_layer])


def _pointers(addresses: list[int]) -> Pointers:
    return (ctypes.c_void_p * len(addresses))(*addresses)
