from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ksana.errors import ModelLoadError
from ksana.models.rope import compute_inv_freq
from ksana.types.model import RopeConfig

ORIGINAL = {"original_max_position_embeddings": 2048.0}
CASES: list[tuple[str, dict[str, float]]] = [
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 2.0, **ORIGINAL}),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}),
    ("llama3", {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, **ORIGINAL}),
    ("yarn", {"factor": 4.0, **ORIGINAL}),
    ("yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": 0.0, **ORIGINAL}),
    ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, **ORIGINAL}),
    ("yarn", {"factor": 4.0, "attention_factor": 1.5, **ORIGINAL}),
]


def theirs(kind: str, parameters: dict[str, Any], theta: float, head_size: int) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": theta, **parameters}
    return LlamaConfig(head_dim=head_size, max_position_embeddings=2048, rope_parameters=rope)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize(("kind", "parameters"), CASES)
def test_equals_transformers(kind: str, parameters: dict[str, float], theta: float, head_size: int) -> None:
    expected, scaling = ROPE_INIT_FUNCTIONS[kind](theirs(kind, parameters, theta, head_size))
    inv_freq, attention_scaling = compute_inv_freq(RopeConfig(theta, kind, parameters), head_size, 2048)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0.0)
    assert attention_scaling == pytest.approx(scaling)


@pytest.mark.parametrize("head_size", [4, 64])
def test_default_equals_transformers(head_size: int) -> None:
    expected = LlamaRotaryEmbedding(theirs("default", {}, 10000.0, head_size)).inv_freq
    inv_freq, scaling = compute_inv_freq(RopeConfig(), head_size, 2048)
    assert torch.equal(inv_freq, expected)
    assert scaling == 1.0


def test_dynamic_belongs_to_the_longest_sequence_served() -> None:
    rope = RopeConfig(10000.0, "dynamic", {"factor": 2.0, **ORIGINAL})
    plain, _ = compute_inv_freq(RopeConfig(), 64, 2048)
    assert torch.equal(compute_inv_freq(rope, 64, 2048)[0], plain)
    assert torch.equal(compute_inv_freq(rope, 64, 100)[0], plain)
    reference = theirs("dynamic", {"factor": 2.0}, 10000.0, 64)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=4096)
    torch.testing.assert_close(compute_inv_freq(rope, 64, 4096)[0], expected)


def test_unknown_kind_and_missing_parameter() -> None:
    with pytest.raises(ModelLoadError, match="'longrope' is not supported"):
        compute_inv_freq(RopeConfig(kind="longrope"), 64, 2048)
    with pytest.raises(ModelLoadError, match="'linear' needs the parameter 'factor'"):
        compute_inv_freq(RopeConfig(kind="linear"), 64, 2048)
