"""How many blocks the KV cache gets."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ksana.errors import UsageError
from ksana.kv.layout import group_layers, kv_cache_specs
from ksana.types.config import CacheConfig
from ksana.types.kv import KVCacheConfig, cdiv
from ksana.types.model import ModelConfig

logger = logging.getLogger(__name__)


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
    groups = group_layers(kv_cache_specs(model, cache.block_size))
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
        "KV cache: %d blocks of %d tokens in %d group(s), %.0f MiB",
        num_blocks - 1,
        cache.block_size,
        len(groups),
        num_blocks * one.bytes_per_block / 2**20,
    )
    return config
