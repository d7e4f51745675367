from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ksana.errors import ModelLoadError
from ksana.models.hf_config import load_hf_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path: Path, architecture: str) -> None:
    # A saved config leaves out what equals the default of its class.
    heads = {"num_attention_heads": 32, "hidden_size": 4096}
    config = load_hf_config(write(tmp_path, architectures=[f"{architecture}ForCausalLM"], **heads))
    theirs = getattr(transformers, f"{architecture}Config")(**{**BASE, **heads})
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_size == (getattr(theirs, "head_dim", None) or 4096 // 32)
    assert config.max_model_len == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    windows = getattr(theirs, "sliding_window", None)
    assert set(config.sliding_windows) == {windows}


@pytest.mark.parametrize(
    ("architecture", "bias", "qkv", "output", "norm"),
    [
        ("Llama", False, False, False, False),
        ("Llama", True, True, True, False),
        ("Mistral", False, False, False, False),
        ("Qwen2", False, True, False, False),
        ("Qwen3", False, False, False, True),
        ("Qwen3", True, True, True, True),
    ],
)
def test_biases_and_norms(tmp_path: Path, architecture: str, bias: bool, qkv: bool, output: bool, norm: bool) -> None:
    folder = write(tmp_path, architectures=[f"{architecture}ForCausalLM"], attention_bias=bias, num_key_value_heads=4)
    config = load_hf_config(folder)
    assert (config.qkv_bias, config.output_bias, config.qk_norm, config.mlp_bias) == (qkv, output, norm, False)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64, "max_position_embeddings": 64}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (None,) * 4),
    ],
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    folder = write(tmp_path, num_key_value_heads=2, **{"architectures": ["Qwen3ForCausalLM"], **changes})
    assert load_hf_config(folder).sliding_windows == windows


@pytest.mark.parametrize(
    ("keys", "wanted", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, keys: dict[str, Any], wanted: str, dtype: str) -> None:
    assert load_hf_config(write(tmp_path, **keys), wanted).dtype == dtype


def test_generation_config_overrides_and_gives_defaults(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True}
    config = load_hf_config(write(tmp_path, generation, eos_token_id=3))
    assert config.eos_token_ids == (5, 7)
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("changes", "kind", "length", "parameters"),
    [
        ({"rope_scaling": None, "rope_theta": 5e5}, "default", 1024, {}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "linear", 1024, {"factor": 4.0}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 512}},
            "linear",
            2048,
            {"factor": 4.0},
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic",
            1024,
            {"factor": 2.0, "original_max_position_embeddings": 1024.0},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            "yarn",
            4096,
            {"factor": 4.0, "original_max_position_embeddings": 1024.0},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 5e5}},
            "yarn",
            1024,
            {"factor": 4.0, "truncate": 0.0, "original_max_position_embeddings": 1024.0},
        ),
        (  # added by hand to what transformers has saved
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 4},
                "rope_theta": ...,
            },
            "linear",
            1024,
            {"factor": 4.0},
        ),
    ],
)
def test_rope_of_both_spellings(
    tmp_path: Path, changes: dict[str, Any], kind: str, length: int, parameters: dict[str, float]
) -> None:
    config = load_hf_config(write(tmp_path, max_position_embeddings=1024, **{"rope_theta": 5e5, **changes}))
    assert (config.rope.kind, config.rope.theta) == (kind, 5e5)
    assert config.max_model_len == length
    assert config.rope.parameters == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": ..., "model_type": "t5"}, "'t5'"),
        ({"hidden_size": ...}, "hidden_size: Field required"),
        ({"vocab_size": -5}, "vocab_size: .*greater than 0.*-5"),
        ({"vocab_size": "many"}, "vocab_size: .*integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers: .*less than or equal to 10000"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        ({"hidden_size": 66}, r"hidden_size \(66\).*num_attention_heads"),
        ({"head_dim": 7}, "even"),
        ({"hidden_act": "gelu"}, "hidden_act: .*'silu'.*'gelu'"),
        ({"torch_dtype": "float64"}, "float64.*--dtype"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'.*supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}}, "below"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "different layers"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "layer_types": ["full_attention"]},
            "layer_types",
        ),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_hf_config(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_hf_config(tmp_path)


def test_absurd_generation_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: top_p"):
        load_hf_config(write(tmp_path, {"top_p": 7.0}))
