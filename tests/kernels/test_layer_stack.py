"""What the native backend remembers of the layers that it computed last."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch

from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu.native_backend import NativeAttentionMetadata, NativeCPUBackend
from ksana.testing.random_layer import LayerRun, LayerShape, hidden_states
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup

SHAPE = LayerShape()


def test_models_that_take_turns_keep_their_own_weights_and_caches(native: NativeCPUBackend) -> None:
    """Fails if pointers of the layers before are used for other layers, or with another cache."""
    hidden = hidden_states(SHAPE, 1, 12)

    def fresh(num_layers: int) -> LayerRun:
        return LayerRun(native, SHAPE, 16, 1, num_layers=num_layers)

    alone = {count: fresh(count).prompt(hidden, chunk=4) for count in (1, 2)}
    runs = {count: fresh(count) for count in (1, 2)}
    parts: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    for start in range(0, 12, 4):
        for count, run in runs.items():
            parts[count] += run.step([(0, start, hidden[start : start + 4])])
    for count, expected in alone.items():
        assert torch.equal(torch.cat(parts[count]), expected)
    assert not torch.equal(alone[1], alone[2])


def test_layers_may_have_another_cache_next(native: NativeCPUBackend) -> None:
    texts = [hidden_states(SHAPE, seed, 8) for seed in (1, 2)]
    expected = [LayerRun(native, SHAPE, 16, 1).prompt(text, chunk=4) for text in texts]
    runs = [LayerRun(native, SHAPE, 16, 1) for _ in texts]
    runs[1]._layers = runs[0]._layers
    for start in (0, 4):
        for run, text, rows in zip(runs, texts, expected, strict=True):
            end = start + 4
            assert torch.equal(run.step([(0, start, text[start:end])])[0], rows[start:end])


def test_a_new_cache_is_not_kept_beside_the_last_one(native: NativeCPUBackend) -> None:
    run = LayerRun(native, SHAPE, 16, 1)
    run.prompt(hidden_states(SHAPE, 1, 4), chunk=4)
    last = weakref.ref(run._cache)
    del run
    spec = FullAttentionSpec(4, 1, 8, "float32")
    native.allocate_kv_cache(KVCacheConfig((KVCacheGroup(spec, (0,), 2),)))
    gc.collect()
    assert last() is None


def test_caches_of_two_types_get_structures_of_their_own() -> None:
    """Fails if the second layer is told the first one's type, by which it would write beyond its blocks."""
    zero = np.zeros(1, dtype=np.int64)
    metadata = NativeAttentionMetadata(AttentionBatch(np.array([0, 1]), zero, zero[:, None], zero, 4, None))
    assert metadata.struct(torch.float32).cache_dtype != metadata.struct(torch.float8_e4m3fn).cache_dtype
    assert metadata.struct(torch.float32) is metadata.struct(torch.float32)
