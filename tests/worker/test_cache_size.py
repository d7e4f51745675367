"""How many blocks the cache gets."""

from __future__ import annotations

from typing import Any

import pytest

from ksana.errors import UsageError
from ksana.kernels.base import KernelBackend
from ksana.testing.random_llama import random_model_config
from ksana.types.config import CacheConfig, SchedulerConfig
from ksana.types.kv import KVCacheConfig
from ksana.worker.cache_size import check_kv_cache_dtype, plan_kv_cache

BLOCK_BYTES = 2 * (2 * 16 * 2 * 8 * 4)
"""Two layers, keys and values, 16 tokens, 2 heads of 8 float32 numbers."""


def plan(
    *,
    memory: int = 10**9,
    longest: int = 10**6,
    limits: SchedulerConfig | None = None,
    windows: tuple[int | None, ...] = (),
    **cache: Any,
) -> KVCacheConfig:
    return plan_kv_cache(
        random_model_config(sliding_windows=windows),
        CacheConfig(**cache),
        limits or SchedulerConfig(),
        max_model_len=longest,
        available_memory=lambda: memory,
    )


def test_share_of_the_free_memory() -> None:
    assert plan(memory=100 * BLOCK_BYTES, memory_fraction=0.5).num_blocks == 50
    assert plan(memory=100 * BLOCK_BYTES, memory_fraction=1.0).num_blocks == 100


def test_upper_limit_in_bytes() -> None:
    assert plan(max_bytes=30 * BLOCK_BYTES + 1).num_blocks == 30


def test_no_more_than_the_requests_can_fill() -> None:
    assert plan(longest=41, limits=SchedulerConfig(max_num_seqs=4)).num_blocks == 4 * 3 + 1


@pytest.mark.parametrize("memory_fraction", [0.5, 0.01])
def test_number_of_blocks_can_be_set_whatever_part_of_the_memory_that_is(memory_fraction: float) -> None:
    config = plan(num_blocks=7, memory_fraction=memory_fraction, memory=8 * BLOCK_BYTES)
    assert config.num_blocks == 7 + 1, "the null block comes on top"


def test_number_of_blocks_can_be_set_where_nobody_knows_the_memory() -> None:
    config = plan_kv_cache(
        random_model_config(),
        CacheConfig(num_blocks=7),
        SchedulerConfig(),
        max_model_len=1,
        available_memory=KernelBackend("cpu").available_memory,
    )
    assert config.num_blocks == 7 + 1


@pytest.mark.parametrize("num_blocks", [8, 10**23])
def test_more_blocks_than_the_memory_holds_are_refused(num_blocks: int) -> None:
    """Not taken one by one until the system ends the process."""
    with pytest.raises(UsageError, match=f"--num-blocks {num_blocks}: as many blocks take .* MiB of memory are free"):
        plan(num_blocks=num_blocks, memory=8 * BLOCK_BYTES)


SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)


def window_blocks(**options: Any) -> int:
    """Usable blocks of a window of 40 tokens, which are 3 blocks, beside full attention."""
    return plan(**{"windows": (None, 40), "limits": SMALL, **options}).groups[1].num_blocks - 1


def test_windows_have_blocks_for_all_requests_and_a_step() -> None:
    assert window_blocks(num_blocks=1000) == 4 * (3 + 2) + 4
    overlapping = SMALL.model_copy(update={"enable_async": True})
    assert window_blocks(num_blocks=1000, limits=overlapping) == 4 * (3 + 2) + 8


def test_windows_never_have_more_blocks_than_full_attention() -> None:
    assert window_blocks(num_blocks=10) == 10


def test_ratio_of_window_blocks_can_be_set_but_one_request_always_fits() -> None:
    assert window_blocks(num_blocks=1000, swa_block_num_ratio=0.1) == 100
    assert window_blocks(num_blocks=1000, swa_block_num_ratio=1.0) == 1000
    assert window_blocks(num_blocks=1000, swa_block_num_ratio=0.001) == 3 + 2 + 4


def test_memory_is_that_of_both_kinds_of_blocks() -> None:
    layer = BLOCK_BYTES // 2
    config = plan(max_bytes=200 * layer, windows=(None, 40), limits=SMALL)
    assert [group.num_blocks for group in config.groups] == [200 - 25, 25]
    assert config.num_bytes == 200 * layer
    config = plan(max_bytes=30 * layer, windows=(None, 40), limits=SMALL)
    assert [group.num_blocks for group in config.groups] == [15, 15], "as many of each where there is little"


def test_model_whose_layers_all_have_a_window_uses_all_memory_for_it() -> None:
    """What is not needed at once keeps prefixes. Blocks that order the sequence take no memory, and never run out."""
    config = plan(max_bytes=100 * BLOCK_BYTES, windows=(40, 40), limits=SMALL, longest=1000)
    assert [group.num_blocks for group in config.groups] == [100]
    assert config.num_logical_blocks == 4 * 63 + 1
    assert plan(num_blocks=9, windows=(40, 40), limits=SMALL).groups[0].num_blocks == 10


def test_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        plan(num_blocks=1000, windows=(None, 40), limits=SMALL)
    assert "1000 blocks of 16 tokens, 24 for windows of 40 tokens, in float32, " in caplog.text


def test_planned_bytes_are_those_of_the_layout() -> None:
    assert plan(num_blocks=1).num_bytes == 2 * BLOCK_BYTES
    assert plan(num_blocks=1, windows=(None, 8)).num_bytes == 2 * BLOCK_BYTES
    assert plan(num_blocks=1, block_size=32).num_bytes == 4 * BLOCK_BYTES


def test_eight_bit_caches_take_a_byte_for_each_number() -> None:
    """The model is in float32: a quarter of its bytes, and four times the blocks of a share of memory."""
    for name, dtype in (("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        config = plan(memory=100 * BLOCK_BYTES, memory_fraction=0.5, kv_cache_dtype=name)
        assert config.groups[0].bytes_per_block == BLOCK_BYTES // 4
        assert config.num_blocks == 200
        assert {group.spec.dtype for group in config.groups} == {dtype}


def test_a_backend_without_such_a_cache_is_named() -> None:
    """Before any weight is loaded."""
    model, backend = random_model_config(), KernelBackend()
    check_kv_cache_dtype(model, CacheConfig(), backend)
    with pytest.raises(
        UsageError, match="--kv-cache-dtype fp8_e5m2: kernel backend 'torch' has no such cache for a float32 model"
    ):
        check_kv_cache_dtype(model, CacheConfig(kv_cache_dtype="fp8_e5m2"), backend)


@pytest.mark.parametrize("memory", [0, BLOCK_BYTES, 5 * BLOCK_BYTES])
def test_no_room_is_a_clear_error(memory: int) -> None:
    with pytest.raises(UsageError, match=r"no memory for a KV cache: .*--cache-memory-fraction"):
        plan(memory=memory)
