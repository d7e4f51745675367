"""Tiny models on disk, and their weights written again as GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from ksana.models.hf_config import load_hf_config
from ksana.testing import tiny_model
from ksana.types.model import ModelConfig

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model; made once for equal arguments."""
    made: dict[str, Path] = {}

    def get(architecture: str = "llama", **overrides: Any) -> Path:
        key = repr((architecture, sorted(overrides.items())))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)
        return made[key]

    return get


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What converters do to q and k of the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_architecture(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write the model of a folder as a GGUF file, its matrices in ``kind``."""

    def write(
        folder: Path,
        path: Path,
        architecture: str,
        kind: str = "F32",
        edit: Callable[[gguf.GGUFWriter], None] | None = None,
    ) -> Path:
        config = load_hf_config(folder)
        writer = gguf.GGUFWriter(path, architecture)
        add_architecture(writer, config)
        if edit:
            edit(writer)
        type_ = gguf.GGMLQuantizationType[kind]
        for name, weight in load_file(folder / "model.safetensors").items():
            if architecture == "llama" and ".q_proj" in name:
                weight = permute(weight, config.num_heads)
            if architecture == "llama" and ".k_proj" in name:
                weight = permute(weight, config.num_kv_heads)
            if weight.ndim == 1 or kind == "F32":
                writer.add_tensor(gguf_name(name), weight.float().numpy())
            else:
                data = gguf.quants.quantize(weight.float().numpy(), type_)
                writer.add_tensor(gguf_name(name), data, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
