"""The native backend at every dispatch level."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ksana.kernels.cpu.library import load_library
from ksana.kernels.cpu.native import NativeKernels
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.types.config import KernelConfig

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")


@pytest.fixture(scope="session")
def native_kernels() -> NativeKernels:
    library = load_library()
    if library is None:
        assert os.environ.get("KSANA_REQUIRE_NATIVE", "") in ("", "0"), "the native library is not built"
        pytest.skip("Ksana was installed without a C++ compiler")
    return NativeKernels(library)


@pytest.fixture(scope="module", params=LEVELS)
def native(request: pytest.FixtureRequest, native_kernels: NativeKernels) -> Iterator[NativeCPUBackend]:
    """One backend a module and level, with two threads. What it packs is for this level."""
    if not native_kernels.set_level(LEVELS.index(request.param)):
        pytest.skip("this processor has not these instructions")
    before = torch.get_num_threads()
    yield NativeCPUBackend(KernelConfig(threads=2), native_kernels)
    torch.set_num_threads(before)
    native_kernels.set_level(native_kernels.best_level())
