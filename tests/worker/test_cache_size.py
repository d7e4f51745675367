"""How many blocks the cache gets."""

from __future__ import annotations

from typing import Any

import pytest

from ksana.errors import UsageError
from ksana.testing.random_llama import random_model_config
from ksana.types.config import CacheConfig
from ksana.types.kv import KVCacheConfig
from ksana.worker.cache_size import plan_kv_cache

BLOCK_BYTES = 2 * (2 * 16 * 2 * 8 * 4)
"""Two layers, keys and values, 16 tokens, 2 heads of 8 float32 numbers."""


def plan(
    *, memory: int = 10**9, useful: int = 10**9, windows: tuple[int | None, ...] = (), **cache: Any
) -> KVCacheConfig:
    return plan_kv_cache(
        random_model_config(sliding_windows=windows),
        CacheConfig(**cache),
        most_useful_tokens=useful,
        available_memory=lambda: memory,
    )


def test_share_of_the_free_memory() -> None:
    assert plan(memory=100 * BLOCK_BYTES, memory_fraction=0.5).num_blocks == 50
    assert plan(memory=100 * BLOCK_BYTES, memory_fraction=1.0).num_blocks == 100


def test_upper_limit_in_bytes() -> None:
    assert plan(max_bytes=30 * BLOCK_BYTES + 1).num_blocks == 30


def test_no_more_than_the_requests_can_fill() -> None:
    assert plan(useful=161).num_blocks == 11 + 1
    hybrid = plan(useful=160, windows=(None, 8))
    assert len(hybrid.groups) == 2
    assert hybrid.num_blocks == 2 * 10 + 1


def test_number_of_blocks_can_be_set_and_the_memory_is_not_asked() -> None:
    def fail() -> int:
        raise NotImplementedError

    config = plan_kv_cache(
        random_model_config(), CacheConfig(num_blocks=7), most_useful_tokens=1, available_memory=fail
    )
    assert config.num_blocks == 7 + 1, "the null block comes on top"


def test_planned_bytes_are_those_of_the_layout() -> None:
    assert plan(num_blocks=1).bytes_per_block == BLOCK_BYTES
    assert plan(num_blocks=1, windows=(None, 8)).bytes_per_block == BLOCK_BYTES // 2
    assert plan(num_blocks=1, block_size=32).bytes_per_block == 2 * BLOCK_BYTES


def test_eight_bit_caches_take_a_byte_for_each_number() -> None:
    """The model is in float32: a quarter of its bytes, and four times the blocks of a share of memory."""
    for name, dtype in (("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        config = plan(memory=100 * BLOCK_BYTES, memory_fraction=0.5, kv_cache_dtype=name)
        assert config.bytes_per_block == BLOCK_BYTES // 4
        assert config.num_blocks == 200
        assert {group.spec.dtype for group in config.groups} == {dtype}


@pytest.mark.parametrize("memory", [0, BLOCK_BYTES, 5 * BLOCK_BYTES])
def test_no_room_is_a_clear_error(memory: int) -> None:
    with pytest.raises(UsageError, match=r"no memory for a KV cache: .*--cache-memory-fraction"):
        plan(memory=memory)
