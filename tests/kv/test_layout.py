"""Which layers share a block table, and what that costs in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ksana.kv.layout import group_layers, kv_cache_specs
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ksana.types.model import ModelConfig, RopeConfig


def model(*windows: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        name="m",
        vocab_size=10,
        hidden_size=16,
        intermediate_size=16,
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        max_model_len=64,
        dtype="bfloat16",
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        sliding_windows=windows if any(windows) else (),
    )


def layers_of(*windows: int | None) -> list[tuple[int, ...]]:
    return [layers for _, layers in group_layers(kv_cache_specs(model(*windows), 16))]


def test_equal_layers_are_one_group() -> None:
    assert layers_of(None, None, None) == [(0, 1, 2)]
    assert layers_of(8, 8) == [(0, 1)]


def test_specs_carry_the_shape_of_the_model() -> None:
    assert kv_cache_specs(model(None, 8), 16) == [
        FullAttentionSpec(16, 2, 8, "bfloat16"),
        SlidingWindowSpec(16, 2, 8, "bfloat16", 8),
    ]


def test_full_attention_comes_first_whatever_the_order_of_layers() -> None:
    """The search for prefixes relies on it."""
    assert layers_of(8, None, 8, None) == [(1, 3), (0, 2)]


def test_every_window_is_one_group_however_many_layers_it_has() -> None:
    assert layers_of(8, 8, None, 8, 8, None, 8) == [(2, 5), (0, 1, 3, 4, 6)]


def test_windows_of_different_sizes_are_different_groups() -> None:
    assert layers_of(8, 4, 8, 4) == [(0, 2), (1, 3)]


@pytest.mark.parametrize("windows", [(None,), (8, 8, None, 8, 8, None, 8), (8, 4, None, 4)])
def test_every_layer_is_in_exactly_one_group(windows: tuple[int | None, ...]) -> None:
    assert sorted(layer for layers in layers_of(*windows) for layer in layers) == list(range(len(windows)))


def test_bytes_are_those_of_each_group() -> None:
    full, window = FullAttentionSpec(16, 2, 8, "bfloat16"), SlidingWindowSpec(16, 2, 8, "bfloat16", 32)
    assert full.bytes_per_block == window.bytes_per_block == 2 * 16 * 2 * 8 * 2
    config = KVCacheConfig((KVCacheGroup(full, (2,), 10), KVCacheGroup(window, (0, 1, 3), 4)))
    assert [group.bytes_per_block for group in config.groups] == [full.bytes_per_block, 3 * full.bytes_per_block]
    assert config.num_bytes == (10 + 3 * 4) * full.bytes_per_block


def test_blocks_of_full_attention_are_logical_where_no_layer_has_it() -> None:
    window = KVCacheGroup(SlidingWindowSpec(16, 2, 8, "bfloat16", 32), (0, 1), 4)
    full = KVCacheGroup(FullAttentionSpec(16, 2, 8, "bfloat16"), (2,), 10)
    hybrid, alone = KVCacheConfig((full, window)), KVCacheConfig((window,), num_logical_blocks=99)
    assert (hybrid.has_full_attention, hybrid.num_blocks, hybrid.window_groups) == (True, 10, (window,))
    assert (alone.has_full_attention, alone.num_blocks, alone.window_groups) == (False, 99, (window,))


def test_kv_and_scheduling_load_no_torch() -> None:
    code = (
        "import sys, ksana.kv, ksana.scheduling, ksana.hookspecs\n"
        "print(*{'torch', 'aiohttp', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
