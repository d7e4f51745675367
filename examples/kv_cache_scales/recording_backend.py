"""A kernel backend that remembers the largest key or value of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ksana.kernels.cpu.backend import CPUBackend
from ksana.kernels.selection import KernelBackendInfo
from ksana.kernels.weights import AttentionWeights
from ksana.markers import hookimpl

NAME = "recording"

largest: defaultdict[int, float] = defaultdict(float)
"""By layer: the largest magnitude so far."""


class RecordingBackend(CPUBackend):
    """The CPU backend, with a look at the keys and values of every step."""

    name = NAME

    def attention(
        self, query: torch.Tensor, kv: torch.Tensor, cache: torch.Tensor, metadata: Any, weights: AttentionWeights
    ) -> torch.Tensor:
        """As in the CPU backend."""
        largest[weights.layer_index] = max(largest[weights.layer_index], float(kv.abs().max()))
        return super().attention(query, kv, cache, metadata, weights)


@hookimpl
def ksana_kernel_backends(register: Callable[[KernelBackendInfo], None]) -> None:
    """Offer the backend to those who ask for it by name."""
    register(KernelBackendInfo(NAME, "cpu", priority=-2, probe=lambda: None, create=RecordingBackend))
