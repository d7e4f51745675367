"""The CPU backend and the defaults of the interface, by the kit that every backend has to pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ksana.kernels.base import KernelBackend, torch_dtype
from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu.attention import CPUAttentionMetadata, DecodePart, PrefillPart
from ksana.kernels.cpu.backend import CPUBackend
from ksana.kernels.cpu.library import load_library
from ksana.kernels.cpu.native import NativeKernels
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.testing.kernel_backend import AttentionCase, KernelBackendTests
from ksana.types.config import KernelConfig
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Other tests of the process keep the number of threads they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def native_kernels() -> NativeKernels:
    library = load_library()
    assert library is not None, "the native library is not built: run make install"
    return NativeKernels(library)


class TestCPUBackend(KernelBackendTests):
    @pytest.fixture
    def backend(self) -> KernelBackend:
        return CPUBackend(KernelConfig(threads=1))


class TestNativeCPUBackend(KernelBackendTests):
    @pytest.fixture(params=range(4), ids=["portable", "avx2", "avx512", "avx512_bf16"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[KernelBackend]:
        kernels = native_kernels()
        if not kernels.set_level(request.param):
            pytest.skip("this processor has not these instructions")
        yield NativeCPUBackend(KernelConfig(threads=2), kernels)
        kernels.set_level(kernels.best_level())


class TestPlainTorch(KernelBackendTests):
    """What a backend gets that overrides nothing: the reference that others are compared with."""

    @pytest.fixture
    def backend(self) -> KernelBackend:
        return KernelBackend()

    def test_memory_is_known(self, backend: KernelBackend) -> None:
        """It is not: the plain backend is no device."""
        with pytest.raises(NotImplementedError, match="set the number of blocks"):
            backend.available_memory()


def test_threads_are_set() -> None:
    assert CPUBackend(KernelConfig(threads=1)).threads == torch.get_num_threads() == 1


def test_cache_has_a_tensor_for_each_layer_with_the_blocks_of_its_group() -> None:
    spec = FullAttentionSpec(4, 2, 8, "bfloat16")
    window = SlidingWindowSpec(4, 2, 8, "bfloat16", 9)
    config = KVCacheConfig((KVCacheGroup(spec, (1,), 5), KVCacheGroup(window, (0, 2), 3)))
    cache = CPUBackend(KernelConfig(threads=1)).allocate_kv_cache(config)
    assert [tuple(cache.tensors[layer].shape) for layer in range(3)] == [(3, 4, 4, 8), (5, 4, 4, 8), (3, 4, 4, 8)]
    assert cache.tensors[0].dtype == torch_dtype("bfloat16") == torch.bfloat16
    assert sum(tensor.nbytes for tensor in cache.tensors.values()) == config.num_bytes
    assert [cache.layer(index)[0] for index in range(3)] == [1, 0, 1]
    for group, layers in enumerate([[1], [0, 2]]):
        for tensor, layer in zip(cache.group_tensors(group), layers, strict=True):
            assert tensor is cache.layer(layer)[1] is cache.tensors[layer]


def decode_batch(lengths: list[int]) -> AttentionBatch:
    rows = len(lengths)
    return AttentionBatch(
        query_starts=np.arange(rows + 1),
        context_lens=np.array(lengths) - 1,
        block_tables=np.zeros((rows, max(lengths)), dtype=np.int64),
        slot_mapping=np.zeros(rows, dtype=np.int64),
        block_size=1,
        sliding_window=None,
    )


def test_similar_contexts_share_a_part_and_different_ones_do_not() -> None:
    """One long context must not make every short one pay for its length."""
    assert len(CPUAttentionMetadata(decode_batch([100, 90, 110, 120])).parts) == 1
    assert len(CPUAttentionMetadata(decode_batch([1000, 10, 11, 1100])).parts) == 2


def test_prompt_without_context_does_not_touch_the_cache() -> None:
    case = AttentionCase(((0, 5), (3, 1)))
    batch = AttentionBatch(
        query_starts=np.array([0, 5, 6]),
        context_lens=np.array([0, 3]),
        block_tables=np.ones((2, 1), dtype=np.int64),
        slot_mapping=np.arange(6),
        block_size=16,
        sliding_window=None,
    )
    prefill, decode = CPUAttentionMetadata(batch).parts
    assert isinstance(prefill, PrefillPart)
    assert isinstance(decode, DecodePart)
    heads = case.num_kv_heads
    query, kv = torch.ones(6, 2 * heads, 8), torch.ones(6, 2 * heads, 8)
    output = torch.zeros(6, 2 * heads, 8)
    prefill.run(query, kv, torch.full((2, 16, 2 * heads, 8), float("nan")), output, case.weights())
    assert torch.equal(output[:5], torch.ones(5, 2 * heads, 8))


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("shape", [(24, 16), (7, 5), (96, 33)])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_bfloat16_projections(rows: int, shape: tuple[int, int], biased: bool) -> None:
    """Prepacked where the processor has bfloat16, plain where it has not; ragged shapes and strided rows too."""
    backend = CPUBackend(KernelConfig(threads=1))
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(*size, generator=generator).bfloat16() for size in (shape, shape[:1], (rows, 2 * shape[1]))
    )
    x = x[:, : shape[1]]
    linear = backend.pack_linear(weight, bias if biased else None)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    with torch.inference_mode():
        torch.testing.assert_close(backend.linear(x, linear).double(), expected, rtol=0.02, atol=0.05)
