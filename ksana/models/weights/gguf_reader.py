"""Weights from GGUF files, decoded to the model's dtype and named as in Hugging Face models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch

from ksana.errors import ModelLoadError
from ksana.models.weights.gguf_file import ROPE_FACTORS, GGUFFile, GGUFTensor
from ksana.types.model import ModelConfig

_CHUNK_ELEMENTS = 2**21
"""Elements decoded at a time: decoding goes through float32 and its temporaries, which must stay small."""

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def iter_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of a GGUF file in ``config.dtype``, the largest first.

    Raises:
        ModelLoadError: the file is damaged, or a tensor is quantised in a way that cannot be decoded.
    """
    file = GGUFFile(path)
    permuted = file.metadata.get("general.architecture") == "llama"
    for tensor in sorted(file.tensors.values(), key=lambda t: t.num_bytes, reverse=True):
        if tensor.name == ROPE_FACTORS:
            continue
        name = hugging_face_name(tensor.name)
        weight = _decode(file, tensor, getattr(torch, config.dtype))
        if permuted and ".q_proj." in name:
            weight = _undo_rotary_permutation(weight, config.num_heads)
        elif permuted and ".k_proj." in name:
            weight = _undo_rotary_permutation(weight, config.num_kv_heads)
        file.release_pages()
        yield name, weight


def hugging_face_name(name: str) -> str:
    """Parameter name in Hugging Face models for a GGUF tensor name; unknown names come back as they are."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match.group(2) in _LAYER_NAMES:
        return f"model.layers.{match.group(1)}.{_LAYER_NAMES[match.group(2)]}.{match.group(3)}"
    match = _GLOBAL_TENSOR.fullmatch(name)
    if match and match.group(1) in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[match.group(1)]}.{match.group(2)}"
    return name


def _decode(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    columns = tensor.shape[-1]
    weight = torch.empty(tensor.num_rows, columns, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, tensor.num_rows, step):
        stop = min(start + step, tensor.num_rows)
        try:
            rows = gguf.quants.dequantize(file.encoded_rows(tensor, start, stop), tensor.type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{file.path}: tensor {tensor.name} is of type {tensor.type.name}, which cannot be decoded; "
                "use a file of another quantisation"
            ) from error
        # Unquantised rows are a read-only view of the file, which torch refuses to wrap.
        weight[start:stop] = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
    return weight.reshape(tensor.shape)


def _undo_rotary_permutation(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection from interleaved pairs to the two halves of each head.

    GGUF files of the llama architecture store the rows for a rotary embedding that turns neighbours; Hugging Face
    models, and ours, turn element i of a head against element i + head_size / 2.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
