"""Tiny random models in the Hugging Face layout, for tests without downloads. Needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 512

_CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_BY_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    # A head size that is not hidden_size / num_attention_heads, as in the real ones.
    "qwen3": {"head_dim": 32},
    # Caps that bend what they meet here, and a scale that does not follow from the head size.
    "gemma2": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "num_hidden_layers": 6,  # five with a window, one without
        "head_dim": 32,
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
    },
}
_UNIT_OFFSET_NORMS = ("gemma2", "gemma3")
"""Their norms have weights around zero, to which they add one."""

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. A journey of a thousand miles begins with a single step.",
    "In the beginning there was a model, and the model was small, and the tests that it served were fast.",
    "What is the capital of France? The capital of France is Paris, and it lies on the river Seine.",
    "for index in range(10): print(index, value) return the answer to the question that nobody has asked",
)


def tiny_model(path: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random model, its tokenizer and a chat template into the folder ``path``.

    Every weight, norm and bias is random, so that one that is lost or misplaced shows in the output. Every string can
    be tokenized: the tokenizer is byte-level. The same arguments write the same weights.

    Args:
        path: folder to fill; made if need be.
        architecture: ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``gemma2`` or ``gemma3``.
        seed: seed of the weights.
        overrides: keys of the model's config, for example ``tie_word_embeddings``, ``attention_bias``,
            ``sliding_window`` or ``rope_parameters``.

    Returns:
        ``path``.
    """
    import torch
    import transformers

    config_class = getattr(transformers, _CONFIG_CLASSES[architecture])
    settings = {**_COMMON, **_BY_ARCHITECTURE[architecture], **overrides}
    dtype: torch.dtype = getattr(torch, settings.pop("dtype"))
    model = transformers.AutoModelForCausalLM.from_config(config_class(**settings), dtype=dtype)
    randomize(model, seed, norms_around=0.0 if architecture in _UNIT_OFFSET_NORMS else 1.0)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    return path


def write_tiny_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of at most ``VOCAB_SIZE`` tokens and its chat template into ``path``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": _COMMON["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def randomize(model: torch.nn.Module, seed: int, *, norms_around: float = 1.0) -> None:
    """Make a model's weights random: matrices with unit gain, norms around one value, biases around zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(noise * 0.1 + (norms_around if "norm" in name else 0.0))
