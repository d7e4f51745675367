"""A Llama of random weights in memory: for tests of what runs models, without files or transformers."""

from __future__ import annotations

from typing import Any

import torch

from ksana.kernels.base import KernelBackend
from ksana.models.llama import LlamaModel
from ksana.types.model import ModelConfig, RopeConfig

_DEFAULTS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "name": "random",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "max_model_len": 256,
    "dtype": "float32",
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(),
    "tie_word_embeddings": False,
}


def random_model_config(**overrides: Any) -> ModelConfig:
    """A small :class:`ModelConfig`; ``overrides`` are fields of it."""
    return ModelConfig(**{**_DEFAULTS, **overrides})


def random_llama(
    backend: KernelBackend, *, seed: int = 0, **overrides: Any
) -> tuple[LlamaModel, dict[str, torch.Tensor]]:
    """A loaded model and its weights by Hugging Face name. Equal arguments make equal models."""
    config = random_model_config(**overrides)
    model = LlamaModel(config, backend)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(shape, generator) for name, shape in _shapes(config).items()}
    for name, weight in weights.items():
        assert model.load_weight(name, weight), f"the model has no {name}"
    missing = model.finish_loading()
    assert not missing, f"no weights for {missing}"
    return model, weights


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return noise * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * noise


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}
