"""Registers the CPU backend, which works everywhere and gives way to any other that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ksana.kernels.selection import KernelBackendInfo
from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.kernels.cpu.backend import CPUBackend
    from ksana.types.config import KernelConfig


def _create(config: KernelConfig) -> CPUBackend:
    from ksana.kernels.cpu.backend import CPUBackend
    from ksana.kernels.cpu.library import load_library
    from ksana.kernels.cpu.native import NativeKernels
    from ksana.kernels.cpu.native_backend import NativeCPUBackend

    library = load_library()
    return CPUBackend(config) if library is None else NativeCPUBackend(config, NativeKernels(library))


def _create_torch(config: KernelConfig) -> CPUBackend:
    from ksana.kernels.cpu.backend import CPUBackend

    return CPUBackend(config)


@hookimpl
def ksana_kernel_backends(register: Callable[[KernelBackendInfo], None]) -> None:
    """Offer the CPU at the lowest priority, and below it the CPU without native kernels, for comparison."""
    register(KernelBackendInfo("cpu", "cpu", priority=0, probe=lambda: None, create=_create))
    register(KernelBackendInfo("cpu-torch", "cpu", priority=-1, probe=lambda: None, create=_create_torch))
