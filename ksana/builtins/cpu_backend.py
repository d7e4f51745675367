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

    return CPUBackend(config)


@hookimpl
def ksana_kernel_backends(register: Callable[[KernelBackendInfo], None]) -> None:
    """Offer the CPU at the lowest priority."""
    register(KernelBackendInfo("cpu", "cpu", priority=0, probe=lambda: None, create=_create))
