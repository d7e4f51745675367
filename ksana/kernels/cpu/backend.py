"""The CPU backend: torch operators, with paged attention that reads each step's keys and values once."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu import machine
from ksana.kernels.cpu.attention import CPUAttentionMetadata
from ksana.kernels.weights import AttentionWeights
from ksana.types.config import KernelConfig

logger = logging.getLogger(__name__)


class CPUBackend(KernelBackend):
    """Runs everywhere; the default of a machine that has nothing else.

    Args:
        config: ``threads`` 0 takes every processor that the machine or container grants.
    """

    name = "cpu"

    def __init__(self, config: KernelConfig) -> None:
        super().__init__("cpu")
        self.threads = config.threads or machine.usable_cpus()
        torch.set_num_threads(self.threads)
        logger.info("CPU backend: %d threads", self.threads)

    def available_memory(self) -> int:
        return machine.available_memory()

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # From the system's zero pages: memory is taken up page by page as blocks are first written, not at the start.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)

    def build_attention_metadata(self, batch: AttentionBatch) -> CPUAttentionMetadata:
        return CPUAttentionMetadata(batch)

    def attention(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        weights: AttentionWeights,
    ) -> torch.Tensor:
        output = query.new_empty(query.shape)
        for part in metadata.parts:
            part.run(query, kv, cache, output, weights)
        return output
