"""The CPU backend: torch operators, with paged attention that reads each step's keys and values once."""

from __future__ import annotations

import functools
import logging
import math
import mmap
from typing import Any

import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu import machine
from ksana.kernels.cpu.attention import CPUAttentionMetadata
from ksana.kernels.float8 import to_float8
from ksana.kernels.quantization import Weight
from ksana.kernels.weights import AttentionWeights, Linear
from ksana.types.config import KernelConfig

logger = logging.getLogger(__name__)


class CPUBackend(KernelBackend):
    """Runs everywhere; the default of a machine that has nothing else.

    Args:
        config: ``threads`` 0 takes every processor that the machine or container grants.
        torch_threads: threads of torch, if not all. Never more than this number is asked for, since torch keeps the
            threads that it once had.
    """

    name = "cpu-torch"

    def __init__(self, config: KernelConfig, torch_threads: int = 0) -> None:
        super().__init__("cpu")
        self.threads = config.threads or machine.usable_cpus()
        torch.set_num_threads(torch_threads or self.threads)
        logger.info("CPU backend: %d threads", self.threads)

    def available_memory(self) -> int:
        return machine.available_memory()

    def kv_cache_dtypes(self, model_dtype: str) -> tuple[str, ...]:
        return (model_dtype, "float8_e4m3fn", "float8_e5m2")

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # From the system's zero pages: memory is taken up page by page as blocks are first written, not at the start.
        # Not by calloc: that may hand out memory which loading has used, and must clear, and so take up, all of it.
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        # In oneDNN's own layout, as compiled graphs use it: half the time of a plain product for a single row, less for
        # more rows, and never slower. Other dtypes gain nothing.
        weight = self._plain(weight)
        if weight.dtype is not torch.bfloat16 or not _can_prepack():
            return super().pack_linear(weight, bias)
        return Linear(None, bias, torch.ops.mkldnn._reorder_linear_weight(weight, None))

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if linear.packed is None:
            return super().linear(x, linear)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, linear.packed, linear.bias, "none", [], "")
        return product

    def build_attention_metadata(self, batch: AttentionBatch) -> Any:
        return CPUAttentionMetadata(batch)

    def attention(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        weights: AttentionWeights,
    ) -> torch.Tensor:
        if weights.soft_cap:  # which the fused operator has not
            return super().attention(query, kv, cache, metadata, weights)
        if cache.dtype != kv.dtype:  # a token shall look the same to those of its own step as to later ones
            kv = to_float8(kv, cache.dtype, weights.kv_scale).to(kv.dtype)
        output = query.new_empty(query.shape)
        for part in metadata.parts:
            part.run(query, kv, cache, output, weights)
        return output if weights.kv_scale == 1.0 else output.mul_(weights.kv_scale)


@functools.cache
def _can_prepack() -> bool:
    """True if this build of torch has oneDNN's prepacked product, and this processor bfloat16 for it."""
    ops = torch.ops.mkldnn
    try:
        if not ops._is_mkldnn_bf16_supported():
            return False
        weight, x = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16)
        product = ops._linear_pointwise(x, ops._reorder_linear_weight(weight, None), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("CPU backend: projections are not prepacked (%s)", " ".join(str(error).split())[:80])
        return False
    return bool((product == 16).all())
