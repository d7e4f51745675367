"""Quantised GGUF tensors used as they are: the same numbers as the gguf package's, in the order of our rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ksana.kernels.quantization import QuantizedWeight
from ksana.models.gguf_config import load_gguf_config
from ksana.models.weights import gguf_reader
from ksana.models.weights.gguf_codes import CodeReader, encoded_size, keeps_codes

KINDS = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K")]


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Any bits, but constants that are numbers of a sensible size."""
    rng = np.random.default_rng(0)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    num_constants = 1 if kind.name in ("Q4_0", "Q8_0") else 2
    constants = rng.standard_normal((len(blocks), num_constants)).astype(np.float16)
    blocks[:, : 2 * num_constants] = constants.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_equal_the_librarys(kind: GGMLQuantizationType) -> None:
    rows = random_blocks(kind, 7, 768)
    reader = CodeReader(kind, 7, 768)
    reader.put(0, rows[:4])
    reader.put(4, rows[4:])
    codes = reader.result()
    minima = None if codes.minima is None else torch.from_numpy(codes.minima)
    weight = QuantizedWeight(
        codes.bits, 32, torch.from_numpy(codes.codes), torch.from_numpy(codes.scales), minima, torch.float32
    )
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.dequantize(rows, kind)))
    assert weight.nbytes == encoded_size(kind, 7 * 768)


def test_other_kinds_are_left_to_the_library() -> None:
    assert not any(keeps_codes(GGMLQuantizationType[name]) for name in ("F16", "BF16", "Q5_1", "Q6_K"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_reader_keeps_what_is_quantised(
    tiny: Callable[..., Path], write_gguf: Callable[..., Path], tmp_path: Path, architecture: str, dtype: str
) -> None:
    """The order of the rows of q and k above all, which files of the llama architecture store otherwise."""
    path = write_gguf(tiny(architecture), tmp_path / "m.gguf", architecture, "Q4_1")
    config = load_gguf_config(path, dtype)
    plain = dict(gguf_reader.iter_weights(path, config))
    stored = dict(gguf_reader.iter_weights(path, replace(config, quantization="stored")))
    assert list(stored) == list(plain)
    for name, weight in stored.items():
        expected = plain[name]
        assert isinstance(expected, torch.Tensor)
        assert isinstance(weight, QuantizedWeight) == (expected.ndim == 2)
        assert torch.equal(weight.dequantize() if isinstance(weight, QuantizedWeight) else weight, expected), name


def test_numbers_that_are_none_are_left_for_the_products_to_show() -> None:
    rows = random_blocks(GGMLQuantizationType.Q4_K, 1, 256)
    rows[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    rows[0, 2:4] = np.array([np.nan], np.float16).view(np.uint8)
    reader = CodeReader(GGMLQuantizationType.Q4_K, 1, 256)
    reader.put(0, rows)
    minima = reader.result().minima
    assert minima is not None
    assert np.isnan(minima).all()
