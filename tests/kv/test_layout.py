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
    return [group.layer_indices for group in group_layers(kv_cache_specs(model(*windows), 16))]


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


def test_commoner_kind_is_split_to_the_size_of_the_rarest() -> None:
    assert layers_of(8, 8, None, 8, 8, None, 8) == [(2, 5), (0, 1), (3, 4), (6,)]


def test_windows_of_different_sizes_are_different_groups() -> None:
    assert layers_of(8, 4, 8, 4) == [(0, 2), (1, 3)]


@pytest.mark.parametrize("windows", [(None,), (8, 8, None, 8, 8, None, 8), (8, 4, None, 4)])
def test_every_layer_is_in_exactly_one_group(windows: tuple[int | None, ...]) -> None:
    assert sorted(layer for layers in layers_of(*windows) for layer in layers) == list(range(len(windows)))


def test_bytes_of_a_block_count_the_tensors_not_the_layers() -> None:
    """4 sliding layers for 2 full ones share 2 tensors: a block takes memory in both, whichever group it serves."""
    spec = FullAttentionSpec(16, 2, 8, "bfloat16")
    assert spec.bytes_per_block == 2 * 16 * 2 * 8 * 2
    config = KVCacheConfig(10, group_layers(kv_cache_specs(model(8, 8, None, 8, 8, None), 16)))
    assert config.num_tensors == 2
    assert config.bytes_per_block == 2 * spec.bytes_per_block


def test_config_with_unequal_groups_has_a_tensor_for_the_longest() -> None:
    spec = FullAttentionSpec(16, 1, 8, "float32")
    assert KVCacheConfig(2, (KVCacheGroup(spec, (0,)), KVCacheGroup(spec, (1, 2, 3)))).num_tensors == 3


def test_kv_and_scheduling_load_no_torch() -> None:
    code = (
        "import sys, ksana.kv, ksana.scheduling, ksana.hookspecs\n"
        "print(*{'torch', 'aiohttp', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
