"""The demo model in the file formats of the engines: the same weights everywhere, but for the quantised file."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from ksana.models.locate import resolve_model


@dataclass(frozen=True)
class ModelFiles:
    """Where the model lies in each format.

    Attributes:
        folder: Hugging Face layout, safetensors in bfloat16.
        gguf_bf16: the same weights in one file.
        gguf_f16: the same weights in float16, for readers that know no bfloat16. Nothing is lost to the eight bits of a
            bfloat16's mantissa; weights below 6e-8 in size become zero.
        gguf_q4_1: the demo model as it is distributed.
    """

    folder: Path
    gguf_bf16: Path
    gguf_f16: Path
    gguf_q4_1: Path


@dataclass(frozen=True)
class ModelShape:
    """What the bounds of the machine are computed from.

    Attributes:
        num_parameters: all of them; the embedding is tied to the output layer, and counts once.
        num_layer_parameters: those of the layers, which every token of a prompt passes.
        num_layers: decoder layers.
        hidden_size: width of queries, that is heads times head size.
        kv_bytes_per_token: bytes of keys and values of one token, all layers, in bfloat16.
    """

    num_parameters: int
    num_layer_parameters: int
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: int

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read it from ``config.json`` of a Llama model with tied embeddings."""
        config: dict[str, int] = json.loads((folder / "config.json").read_text())
        hidden, intermediate, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        per_layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * intermediate + 2 * hidden
        in_layers = layers * per_layer
        total = in_layers + config["vocab_size"] * hidden + hidden
        return cls(total, in_layers, layers, hidden, layers * 2 * kv_width * 2)


def prepare_model(cache: Path) -> ModelFiles:
    """Make the files under ``cache`` that are not there yet.

    Raises:
        UsageError: the demo model is not installed.
    """
    source = resolve_model("demo")
    files = ModelFiles(cache / "smollm2", cache / "smollm2-bf16.gguf", cache / "smollm2-f16.gguf", source)
    cache.mkdir(parents=True, exist_ok=True)
    if not files.folder.exists():
        _write_folder(source, files.folder)
    for path, kind in ((files.gguf_bf16, "BF16"), (files.gguf_f16, "F16")):
        if not path.exists():
            _write_gguf(source, path, kind)
    return files


def _write_folder(source: Path, folder: Path) -> None:
    """Through transformers, whose reader of GGUF files is not ours: a mistake of ours must not reach the peers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config.rms_norm_eps = 1e-5  # read back as 9.9999997e-06
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(folder)


def _write_gguf(source: Path, path: Path, kind: str) -> None:
    """Copy a GGUF file with its matrices, rounded to bfloat16, stored as ``kind``; vectors become float32."""
    reader = gguf.GGUFReader(source)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        value = field.contents()
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, field.types[0])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    bf16, stored = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if weight.ndim == 1:
            writer.add_tensor(tensor.name, weight)
            continue
        rounded = gguf.dequantize(gguf.quantize(weight, bf16), bf16)
        writer.add_tensor(tensor.name, gguf.quantize(rounded, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
