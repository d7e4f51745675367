"""How many blocks the KV cache gets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.kv.layout import group_layers, kv_cache_specs
from ksana.types.config import CacheConfig
from ksana.types.kv import KVCacheConfig, cdiv
from ksana.types.model import ModelConfig

if TYPE_CHECKING:
    from ksana.kernels.base import KernelBackend

logger = logging.getLogger(__name__)


_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Torch's names for the values of ``--kv-cache-dtype``."""


def check_kv_cache_dtype(model: ModelConfig, cache: CacheConfig, backend: KernelBackend) -> None:
    """Refuse a cache that the backend cannot keep, which is known before any weight is loaded.

    Raises:
        UsageError: the backend's attention has no such cache for this model.
    """
    if cache.kv_cache_dtype != "auto" and _FP8[cache.kv_cache_dtype] not in backend.kv_cache_dtypes(model.dtype):
        raise UsageError(
            f"--kv-cache-dtype {cache.kv_cache_dtype}: kernel backend {backend.name!r} has no such cache for a "
            f"{model.dtype} model; leave it at auto"
        )


def plan_kv_cache(
    model: ModelConfig, cache: CacheConfig, *, most_useful_tokens: int, available_memory: Callable[[], int]
) -> KVCacheConfig:
    """Lay out the cache: the configured number of blocks, or what the free memory allows.

    Args:
        model: its layers decide the groups and the bytes of a block.
        cache: block size, and either the number of blocks or a share of memory with an upper limit.
        most_useful_tokens: tokens beyond which the cache could never be filled (longest request x most requests).
        available_memory: bytes free on the device, asked after the weights are loaded.

    Raises:
        UsageError: there is no room for even a few blocks.
    """
    groups = group_layers(kv_cache_specs(model, cache.block_size, _FP8.get(cache.kv_cache_dtype, "")))
    one = KVCacheConfig(1, groups)
    if cache.num_blocks:
        num_blocks = cache.num_blocks + 1  # one more: the null block
    else:
        budget = min(int(available_memory() * cache.memory_fraction), cache.max_bytes)
        useful = len(groups) * cdiv(most_useful_tokens, cache.block_size) + 1
        num_blocks = min(budget // one.bytes_per_block, useful)
        if num_blocks < 2 + len(groups):
            raise UsageError(
                f"no memory for a KV cache: {budget / 2**20:.0f} MiB is less than {2 + len(groups)} blocks of "
                f"{one.bytes_per_block / 2**20:.1f} MiB; free some, or raise --cache-memory-fraction or "
                "--cache-max-bytes"
            )
    config = KVCacheConfig(num_blocks, groups)
    logger.info(
        "KV cache: %d blocks of %d tokens in %d group(s) of %s, %.0f MiB",
        num_blocks - 1,
        cache.block_size,
        len(groups),
        groups[0].spec.dtype,
        num_blocks * one.bytes_per_block / 2**20,
    )
    return config
