"""How many blocks the KV cache gets: of full attention, and of sliding windows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.kv.layout import group_layers, kv_cache_specs
from ksana.types.config import CacheConfig, SchedulerConfig
from ksana.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec, cdiv
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
    model: ModelConfig,
    cache: CacheConfig,
    limits: SchedulerConfig,
    *,
    max_model_len: int,
    available_memory: Callable[[], int],
) -> KVCacheConfig:
    """Lay out the cache: the configured number of blocks, or what the free memory allows.

    Args:
        model: its layers decide the groups and the bytes of a block.
        cache: block size, and either the number of blocks or a share of memory with an upper limit.
        limits: how many requests and tokens are computed at once, which is what sliding windows need blocks for.
        max_model_len: tokens of the longest request.
        available_memory: bytes free on the device, asked after the weights are loaded.

    Raises:
        UsageError: there is no room for even a few blocks, or for as many as are wanted.
    """
    plan = _Plan(model, cache, limits, max_model_len)
    config = plan.with_blocks(cache.num_blocks or plan.blocks_that_fit(available_memory))
    if cache.num_blocks:
        with suppress(NotImplementedError):  # a backend need not know its memory
            _check_that_it_fits(cache.num_blocks, config, available_memory())
    _log(config)
    return config


def _check_that_it_fits(num_blocks: int, config: KVCacheConfig, available: int) -> None:
    if config.num_bytes > available:
        raise UsageError(
            f"--num-blocks {num_blocks}: as many blocks take {config.num_bytes / 2**20:,.0f} MiB, and "
            f"{available / 2**20:,.0f} MiB of memory are free; 0 takes what fits"
        )


class _Plan:
    """How the cache grows with the number of blocks of its first group."""

    def __init__(self, model: ModelConfig, cache: CacheConfig, limits: SchedulerConfig, max_model_len: int) -> None:
        self._layers = group_layers(kv_cache_specs(model, cache.block_size, _FP8.get(cache.kv_cache_dtype, "")))
        self._has_full_attention = not isinstance(self._layers[0][0], SlidingWindowSpec)
        self._cache = cache
        self._limits = limits
        self._useful = limits.max_num_seqs * cdiv(max_model_len, cache.block_size)

    def with_blocks(self, num_blocks: int) -> KVCacheConfig:
        """A cache of ``num_blocks`` usable blocks in the first group; each group has the null block on top."""
        groups = tuple(
            KVCacheGroup(spec, layers, 1 + self._group_blocks(spec, num_blocks)) for spec, layers in self._layers
        )
        return KVCacheConfig(groups, num_logical_blocks=1 + max(num_blocks, self._useful))

    def blocks_that_fit(self, available_memory: Callable[[], int]) -> int:
        """Most blocks that the configured share of memory has room for, and that requests could fill."""
        budget = min(int(available_memory() * self._cache.memory_fraction), self._cache.max_bytes)
        least = self.with_blocks(2).num_bytes
        if budget < least:
            raise UsageError(
                f"no memory for a KV cache: {budget / 2**20:.0f} MiB is less than the {least / 2**20:.1f} MiB that "
                "the smallest one takes; free some, or raise --cache-memory-fraction or --cache-max-bytes"
            )
        low, high = 1, self._useful
        while low < high:
            middle = (low + high + 1) // 2
            if self.with_blocks(middle).num_bytes <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def _group_blocks(self, spec: KVCacheSpec, num_blocks: int) -> int:
        """Beside full attention, which it never needs more blocks than, a window has what requests need at once."""
        if not isinstance(spec, SlidingWindowSpec) or not self._has_full_attention:
            return num_blocks
        limits, size = self._limits, spec.block_size
        in_flight = limits.max_num_batched_tokens * (2 if limits.enable_async else 1)
        # Windows and chunks need not begin at a block's edge: a block more for each.
        one, chunks = spec.window_blocks + 2, cdiv(in_flight, size)
        wanted = ceil(self._cache.swa_block_num_ratio * num_blocks) or limits.max_num_seqs * one + chunks
        return min(num_blocks, max(wanted, one + chunks))  # a single request always fits


def _log(config: KVCacheConfig) -> None:
    windows = [f", {g.num_blocks - 1} for windows of {g.sliding_window} tokens" for g in config.groups[1:]]
    logger.info(
        "KV cache: %d blocks of %d tokens%s, in %s, %.0f MiB",
        config.groups[0].num_blocks - 1,
        config.block_size,
        "".join(windows),
        config.groups[0].spec.dtype,
        config.num_bytes / 2**20,
    )
