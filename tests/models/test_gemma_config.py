"""``config.json`` of Gemma 2 and 3, in the spellings that files in circulation have."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from ksana.errors import ModelLoadError
from ksana.models.hf_config import load_hf_config
from ksana.types.model import RopeConfig

LOCAL = RopeConfig(10_000.0)

GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
OLD = {
    **GEMMA3,
    "num_hidden_layers": 8,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "rope_theta": 2e6,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_act": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
}
NEW = {
    **GEMMA3,
    "num_hidden_layers": 8,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, *["sliding_attention"] * 2],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "config_class"), [(GEMMA2, transformers.Gemma2Config), (GEMMA3, transformers.Gemma3TextConfig)]
)
def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path: Path, config: Any, config_class: Any) -> None:
    """All of them: of a large model's text part, files state little more than four sizes."""
    ours, theirs = load_hf_config(write(tmp_path, config)), config_class()
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.intermediate_size, ours.num_layers) == (theirs.intermediate_size, theirs.num_hidden_layers)
    heads = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.num_heads, ours.num_kv_heads, ours.head_size) == heads
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    caps = (theirs.attn_logit_softcapping or 0.0, theirs.final_logit_softcapping or 0.0)
    assert (ours.attention_soft_cap, ours.logits_soft_cap) == caps
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(ours.sliding_windows) == windows


@pytest.mark.parametrize("config", [OLD, NEW], ids=["old", "new"])
def test_ropes_of_both_spellings(tmp_path: Path, config: dict[str, Any]) -> None:
    """Scaling is for the layers that see everything; the others turn as far as their window alone needs."""
    ours = load_hf_config(write(tmp_path, config))
    full = RopeConfig(2e6, "linear", {"factor": 8.0})
    assert ours.rope == full
    assert ours.layer_ropes == (LOCAL, LOCAL, full, LOCAL, LOCAL, full, LOCAL, LOCAL)
    assert ours.sliding_windows == (512, 512, None, 512, 512, None, 512, 512)
    theirs = transformers.Gemma3TextConfig(**config).rope_parameters
    assert (theirs["full_attention"]["rope_theta"], theirs["full_attention"]["factor"]) == (2e6, 8.0)
    assert theirs["sliding_attention"]["rope_theta"] == 10_000.0


def test_scaling_added_by_hand_to_what_transformers_has_saved(tmp_path: Path) -> None:
    plain = {"full_attention": {"rope_type": "default", "rope_theta": 2e6}, "sliding_attention": {"rope_theta": 5e3}}
    config = {**NEW, "rope_parameters": plain, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    ours = load_hf_config(write(tmp_path, config))
    assert ours.rope == RopeConfig(2e6, "linear", {"factor": 2.0})
    assert ours.layer_ropes[0] == RopeConfig(5e3)


def test_a_layer_that_needs_no_window_keeps_its_rope(tmp_path: Path) -> None:
    """Short texts never outgrow the window, and so it is gone from the cache's plan; the frequencies are not."""
    ours = load_hf_config(write(tmp_path, {**OLD, "max_position_embeddings": 256}))
    assert set(ours.sliding_windows) == {None}
    assert ours.layer_ropes[:2] == (LOCAL, LOCAL)


def test_generation_config_ends_turns(tmp_path: Path) -> None:
    """1 ends a document, 106 a turn of a conversation: what config.json says stops no chat."""
    folder = write(tmp_path, {**GEMMA3, "eos_token_id": 1}, {"eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95})
    config = load_hf_config(folder)
    assert config.eos_token_ids == (1, 106)
    assert config.generation_defaults == {"top_k": 64, "top_p": 0.95}


def test_text_part_of_a_model_that_sees_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "eos_token_id": 1}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    with caplog.at_level(logging.INFO):
        config = load_hf_config(write(tmp_path, whole))
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.dtype) == (2560, 34, 262_208, "bfloat16")
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((1, 106), True)
    assert config.rope == RopeConfig(1e6, "linear", {"factor": 8.0})
    assert config.layer_ropes.count(LOCAL) == config.sliding_windows.count(1024) == 29
    assert "will not see images" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: .*not True"),
        ({"hidden_activation": "gelu"}, "hidden_activation: .*'gelu_pytorch_tanh'.*not 'gelu'"),
        ({"sliding_window": None}, "sliding_window: .*not None"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern: .*not 0"),
        ({"layer_types": ["full_attention"] * 7}, r"layer_types must have num_hidden_layers \(8\) entries, not 7"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types.*chunked_attention"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: .*not -1.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "longrope"}}}, "'longrope'"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported: .*Gemma2ForCausalLM"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_hf_config(write(tmp_path, {**OLD, **changes}))
    assert str(tmp_path / "config.json") in str(caught.value)
