"""Weights from GGUF files, decoded to the model's dtype or kept as integers, and named as in Hugging Face models.

Decoding begins as soon as it is asked for, on a thread of its own and with numpy alone, so that a start can do it while
it imports torch. More threads gain nothing: numpy makes many short steps, and each needs the interpreter lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt

from ksana.errors import ModelLoadError
from ksana.models.weights.gguf_codes import GROUP_SIZE, CodeReader, GGUFCodes, encoded_size, keeps_codes
from ksana.models.weights.gguf_file import ROPE_FACTORS, GGUFFile, GGUFTensor
from ksana.models.weights.read_ahead import ReadAhead
from ksana.types.model import ModelConfig

if TYPE_CHECKING:
    from ksana.kernels.quantization import Weight

Array = npt.NDArray[Any]

AHEAD_BYTES = 2**28
"""Decoded bytes that may wait to be taken. Nobody takes any while torch is imported."""

_CHUNK_ELEMENTS = 2**22
"""Elements decoded at a time. Decoding goes through float32 and its temporaries, which must stay small; but the fewer
chunks there are, the less often the thread waits for the interpreter lock."""

_NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""How the decoded elements are held; numpy has no bfloat16, so there are its bits."""

_BFLOAT16_NAN = 0x7FC0

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


def iter_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """Begin to decode a GGUF file; yields every weight in ``config.dtype``, the largest first.

    If ``config.quantization`` is ``stored``, those that the file holds as integers which kernels can multiply stay so.

    Raises:
        ModelLoadError: the file is damaged, or a tensor is quantised in a way that cannot be decoded.
    """
    file = GGUFFile.open(path)
    tensors = [tensor for tensor in file.tensors.values() if tensor.name != ROPE_FACTORS]
    tensors.sort(key=lambda tensor: tensor.num_bytes, reverse=True)
    tasks = [(_result_bytes(tensor, config), partial(_read, file, tensor, config)) for tensor in tensors]
    return _as_torch(ReadAhead(tasks, max_bytes=AHEAD_BYTES), config)


def _as_torch(weights: ReadAhead[tuple[str, Array | GGUFCodes]], config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    import torch

    from ksana.kernels.base import torch_dtype
    from ksana.kernels.quantization import QuantizedWeight

    for name, weight in weights:
        if isinstance(weight, GGUFCodes):
            codes, scales = torch.from_numpy(weight.codes), torch.from_numpy(weight.scales)
            minima = None if weight.minima is None else torch.from_numpy(weight.minima)
            yield name, QuantizedWeight(weight.bits, GROUP_SIZE, codes, scales, minima, torch_dtype(config.dtype))
        elif config.dtype == "bfloat16":
            yield name, torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
        else:
            yield name, torch.from_numpy(weight)


def _stays_quantized(tensor: GGUFTensor, config: ModelConfig) -> bool:
    return config.quantization == "stored" and len(tensor.shape) == 2 and keeps_codes(tensor.type)


def _result_bytes(tensor: GGUFTensor, config: ModelConfig) -> int:
    if _stays_quantized(tensor, config):
        return encoded_size(tensor.type, tensor.num_elements)
    return tensor.num_elements * np.dtype(_NUMPY_DTYPES[config.dtype]).itemsize


def _read(file: GGUFFile, tensor: GGUFTensor, config: ModelConfig) -> tuple[str, Array | GGUFCodes]:
    name = hugging_face_name(tensor.name)
    weight = _read_codes(file, tensor) if _stays_quantized(tensor, config) else _decode(file, tensor, config.dtype)
    if file.metadata.get("general.architecture") == "llama":
        if ".q_proj." in name:
            weight = _reorder(weight, config.num_heads)
        elif ".k_proj." in name:
            weight = _reorder(weight, config.num_kv_heads)
    file.release_pages(tensor)
    return name, weight


def _reorder(weight: Array | GGUFCodes, num_heads: int) -> Array | GGUFCodes:
    undo = partial(_undo_rotary_permutation, num_heads=num_heads)
    return weight.each(undo) if isinstance(weight, GGUFCodes) else undo(weight)


def hugging_face_name(name: str) -> str:
    """Parameter name in Hugging Face models for a GGUF tensor name; unknown names come back as they are."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match.group(2) in _LAYER_NAMES:
        return f"model.layers.{match.group(1)}.{_LAYER_NAMES[match.group(2)]}.{match.group(3)}"
    match = _GLOBAL_TENSOR.fullmatch(name)
    if match and match.group(1) in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[match.group(1)]}.{match.group(2)}"
    return name


def _read_codes(file: GGUFFile, tensor: GGUFTensor) -> GGUFCodes:
    reader = CodeReader(tensor.type, *tensor.shape)
    step = max(1, _CHUNK_ELEMENTS // tensor.shape[1])
    for start in range(0, tensor.num_rows, step):
        reader.put(start, file.encoded_rows(tensor, start, min(start + step, tensor.num_rows)))
    return reader.result()


def _decode(file: GGUFFile, tensor: GGUFTensor, dtype: str) -> Array:
    columns = tensor.shape[-1]
    weight: Array = np.empty((tensor.num_rows, columns), _NUMPY_DTYPES[dtype])
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, tensor.num_rows, step):
        stop = min(start + step, tensor.num_rows)
        try:
            # As one long row: the library would take few rows at a time, and hold the interpreter lock all the while.
            row = gguf.quants.dequantize(file.encoded_rows(tensor, start, stop).reshape(1, -1), tensor.type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{file.path}: tensor {tensor.name} is of type {tensor.type.name}, which cannot be decoded; "
                "use a file of another quantisation"
            ) from error
        weight[start:stop] = (_bfloat16_bits(row) if dtype == "bfloat16" else row).reshape(stop - start, columns)
    return weight.reshape(tensor.shape)


def _bfloat16_bits(numbers: Array) -> npt.NDArray[np.uint32]:
    """Bits of the nearest bfloat16 numbers; of two equally near ones the even, as everywhere."""
    bits = numbers.astype(np.float32).view(np.uint32)
    not_numbers = np.isnan(numbers)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    bits[not_numbers] = _BFLOAT16_NAN  # rounding may have carried it over to a number
    return bits


def _undo_rotary_permutation(weight: Array, num_heads: int) -> Array:
    """Reorder the rows of a query or key projection from interleaved pairs to the two halves of each head.

    GGUF files of the llama architecture store the rows for a rotary embedding that turns neighbours; Hugging Face
    models, and ours, turn element i of a head against element i + head_size / 2.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
