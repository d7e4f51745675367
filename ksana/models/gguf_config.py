"""The metadata of a GGUF file, read into :class:`ModelConfig`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np

from ksana.errors import ModelLoadError
from ksana.models.weights.gguf_file import ROPE_FACTORS, GGUFFile
from ksana.types.model import ModelConfig, RopeConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
"""What Llama 3.1 to 3.3 were trained with. A GGUF file stores only the resulting table of factors."""

_POOLINGS = {0: "last", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Names of ``pooling_type``; 0 leaves it open."""

T = TypeVar("T", int, float)


def load_gguf_config(path: Path, dtype: str = "auto") -> ModelConfig:
    """Describe the model in the GGUF file ``path``.

    Args:
        path: the file.
        dtype: ``auto`` takes the one of the file's matrices, bfloat16 if they are quantised.

    Raises:
        ModelLoadError: the file is damaged, lacks a key, or holds a model of an unsupported kind.
    """
    return _Reader(GGUFFile.open(path)).read(dtype)


class _Reader:
    """Looks up keys under the architecture's prefix, with errors that name file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._architecture = file.get("general.architecture", str) or ""
        if self._architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{file.path}: architecture {self._architecture!r} is not supported; "
                f"supported in GGUF files: {', '.join(_ARCHITECTURES)}"
            )
        if self._number("expert_count", int, 0):
            raise ModelLoadError(f"{file.path}: mixture-of-experts models are not supported")
        if (file.get("split.count", int) or 1) > 1:
            raise ModelLoadError(f"{file.path}: is one of several parts; merge them with llama-gguf-split first")

    def read(self, dtype: str) -> ModelConfig:
        hidden_size = self._required("embedding_length")
        num_heads = self._required("attention.head_count")
        num_kv_heads = self._number("attention.head_count_kv", int, num_heads)
        head_size = self._number("attention.key_length", int, hidden_size // num_heads)
        self._check_heads(num_heads, num_kv_heads, head_size)
        num_layers = self._num_layers()
        rope, max_model_len = self._rope(head_size)
        return ModelConfig(
            architecture=_ARCHITECTURES[self._architecture],
            name=self._file.path.stem,
            vocab_size=self._vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=self._required("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_model_len=max_model_len,
            dtype=self._dtype() if dtype == "auto" else dtype,
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon", float, 1e-6),
            rope=rope,
            tie_word_embeddings="output.weight" not in self._file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self._file.tensors,
            output_bias="blk.0.attn_output.bias" in self._file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._file.tensors,
            sliding_windows=(None,) * num_layers,
            bos_token_id=self._file.get("tokenizer.ggml.bos_token_id", int),
            eos_token_ids=self._end_tokens(),
            pooling=self._pooling(),
        )

    def _number(self, key: str, expected: type[T], default: T) -> T:
        value = self._file.get(f"{self._architecture}.{key}", expected)
        if value is None:
            return default
        if value < 0:
            raise ModelLoadError(f"{self._file.path}: {self._architecture}.{key} must not be negative, not {value}")
        return value

    def _required(self, key: str) -> int:
        value = self._number(key, int, 0)
        if value == 0:
            raise ModelLoadError(f"{self._file.path}: {self._architecture}.{key} is missing or 0")
        return value

    def _num_layers(self) -> int:
        count = self._required("block_count")
        if f"blk.{count - 1}.attn_norm.weight" not in self._file.tensors:
            raise ModelLoadError(f"{self._file.path}: has no weights for the last of its {count} layers")
        return count

    def _check_heads(self, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        rotated = self._number("rope.dimension_count", int, head_size)
        if rotated != head_size:
            raise ModelLoadError(f"{self._file.path}: only {rotated} of {head_size} elements of a head are rotated")
        if num_kv_heads == 0 or num_heads % num_kv_heads or head_size % 2 or head_size < 4:
            raise ModelLoadError(
                f"{self._file.path}: {num_heads} heads, {num_kv_heads} key-value heads and a head size of {head_size} "
                "do not go together"
            )

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelLoadError(f"{self._file.path}: the tensor token_embd.weight is missing")
        return embedding.shape[0]

    def _dtype(self) -> str:
        unquantised = {"F32": "float32", "F16": "float16"}
        sizes: dict[str, int] = {}
        for tensor in self._file.tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
        return unquantised.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")

    def _end_tokens(self) -> tuple[int, ...]:
        ids = (self._file.get(f"tokenizer.ggml.{key}", int) for key in _END_TOKEN_KEYS)
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _pooling(self) -> str:
        kind = self._number("pooling_type", int, 0)
        return _POOLINGS.get(kind, f"type {kind}")

    def _rope(self, head_size: int) -> tuple[RopeConfig, int]:
        theta = self._number("rope.freq_base", float, 10000.0)
        max_model_len = self._required("context_length")
        if ROPE_FACTORS in self._file.tensors:
            return RopeConfig(theta, "llama3", self._llama3_parameters(theta, head_size)), max_model_len
        kind = self._file.get(f"{self._architecture}.rope.scaling.type", str) or "none"
        if kind == "none":
            return RopeConfig(theta), max_model_len
        factor = self._number("rope.scaling.factor", float, 0.0)
        original = self._number("rope.scaling.original_context_length", int, max_model_len)
        if kind not in ("linear", "yarn") or factor == 0.0 or original == 0:
            raise ModelLoadError(f"{self._file.path}: rope scaling {kind!r} by {factor} is not supported")
        parameters = {"factor": factor}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = float(original)
        return RopeConfig(theta, kind, parameters), max_model_len

    def _llama3_parameters(self, theta: float, head_size: int) -> dict[str, float]:
        """Find the parameters behind the table of factors; refuse a table that they do not reproduce."""
        tensor = self._file.tensors[ROPE_FACTORS]
        rows = self._file.encoded_rows(tensor, 0, tensor.num_rows)
        table = gguf.quants.dequantize(rows, tensor.type).reshape(-1)
        factor = float(table.max())
        inv_freq = theta ** -(np.arange(0, head_size, 2) / head_size)
        rotations = _LLAMA3_ROPE["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
        keep = ((rotations - low) / (high - low)).clip(0.0, 1.0)
        expected = 1.0 / ((1.0 - keep) / factor + keep)
        if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
            raise ModelLoadError(f"{self._file.path}: the rope factors in {ROPE_FACTORS} are not those of Llama 3")
        return {"factor": factor, **_LLAMA3_ROPE}
