"""The CPU backend: torch operators, with paged attention that reads each step's keys and values once."""

from __future__ import annotations

import logging

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
