from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ksana.errors import ModelLoadError
from ksana.models.gguf_config import load_gguf_config
from ksana.models.hf_config import load_hf_config
from ksana.models.rope import compute_inv_freq
from ksana.types.model import RopeConfig

Tiny = Callable[..., Path]
WriteGGUF = Callable[..., Path]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_config_of_the_folder(
    tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path, architecture: str, tied: bool
) -> None:
    folder = tiny(architecture, tie_word_embeddings=tied)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)

    ours = load_gguf_config(write_gguf(folder, tmp_path / "m.gguf", architecture, edit=edit))
    theirs = load_hf_config(folder)
    assert ours == replace(theirs, name="m", rms_norm_eps=ours.rms_norm_eps, eos_token_ids=(2, 5))
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)


def test_llama_biases_are_seen(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    folder = tiny("llama", attention_bias=True, mlp_bias=True)
    config = load_gguf_config(write_gguf(folder, tmp_path / "m.gguf", "llama"))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_dtype_follows_the_matrices(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path, kind: str, dtype: str) -> None:
    path = write_gguf(tiny("qwen2"), tmp_path / "m.gguf", "qwen2", kind)
    assert load_gguf_config(path).dtype == dtype
    assert load_gguf_config(path, "float32").dtype == "float32"


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path, kind: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = load_gguf_config(write_gguf(tiny("qwen2"), tmp_path / "m.gguf", "qwen2", edit=edit)).rope
    assert (rope.kind, rope.parameters["factor"]) == (kind, 4.0)
    assert rope.parameters.get("original_max_position_embeddings", 128.0) == 128.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_recognised(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path, factor: float) -> None:
    parameters = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 8192.0
    scaled, _ = compute_inv_freq(RopeConfig(10000.0, "llama3", parameters), 16, 512)
    plain, _ = compute_inv_freq(RopeConfig(10000.0), 16, 512)

    def write(table: torch.Tensor, path: Path) -> Path:
        return write_gguf(
            tiny("llama"), path, "llama", edit=lambda writer: writer.add_tensor("rope_freqs.weight", table.numpy())
        )

    rope = load_gguf_config(write(plain / scaled, tmp_path / "m.gguf")).rope
    assert (rope.kind, rope.parameters) == ("llama3", pytest.approx(parameters))
    with pytest.raises(ModelLoadError, match="not those of Llama 3"):
        load_gguf_config(write(torch.linspace(1, 8, 8), tmp_path / "other.gguf"))


def write_metadata(path: Path, architecture: str, **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("gpt2", {}, "'gpt2' is not supported; supported in GGUF files: llama, qwen2, qwen3"),
        ("gemma3", {}, "'gemma3' is not supported"),
        ("llama", {}, "llama.embedding_length is missing"),
        ("llama", {"llama__embedding_length": "64"}, "llama.embedding_length must be int, not str"),
        ("llama", {"llama__embedding_length": -64}, "must not be negative"),
        ("llama", {"llama__expert_count": 8}, "mixture-of-experts"),
        ("llama", {"split__count": 3}, "one of several parts"),
        (
            "llama",
            {"llama__embedding_length": 64, "llama__attention__head_count": 4, "llama__attention__head_count_kv": 3},
            "do not go together",
        ),
        (
            "llama",
            {"llama__embedding_length": 64, "llama__attention__head_count": 4, "llama__rope__dimension_count": 8},
            "only 8 of 16 elements",
        ),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, architecture: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_gguf_config(write_metadata(tmp_path / "m.gguf", architecture, **values))
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", b"PK\x03\x04" * 10, b"GGUF\x01\0\0\0" + b"\0" * 32, b"GGUF" + b"\xff" * 64]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        load_gguf_config(tmp_path / "m.gguf")


def test_layers_without_weights_are_named(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"blk.2.attn_norm", b"blk.7.attn_norm"))
    with pytest.raises(ModelLoadError, match="no weights for the last of its 3 layers"):
        load_gguf_config(path)


def test_damaged_head_never_escapes_as_another_error(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    whole = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama").read_bytes()
    for position in range(0, 1500, 7):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        (tmp_path / "broken.gguf").write_bytes(broken)
        with contextlib.suppress(ModelLoadError):
            load_gguf_config(tmp_path / "broken.gguf")


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (gguf.PoolingType.NONE, "last"),
        (gguf.PoolingType.MEAN, "mean"),
        (gguf.PoolingType.CLS, "cls"),
        (gguf.PoolingType.LAST, "last"),
        (gguf.PoolingType.RANK, "rank"),
    ],
)
def test_pooling(tiny: Tiny, write_gguf: WriteGGUF, tmp_path: Path, kind: gguf.PoolingType, pooling: str) -> None:
    path = write_gguf(tiny("qwen3"), tmp_path / "m.gguf", "qwen3", edit=lambda writer: writer.add_pooling_type(kind))
    assert load_gguf_config(path).pooling == pooling
