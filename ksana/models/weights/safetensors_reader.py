"""Weights from ``.safetensors`` files, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ksana.errors import ModelLoadError
from ksana.models.weights.batches import batch_by_bytes
from ksana.models.weights.shards import find_weight_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; empty if it has none."""
    return find_weight_files(folder, SINGLE_FILE, INDEX_FILE)


def iter_weights(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``files``, the largest of each file first, as views of the mapped file.

    Raises:
        ModelLoadError: a file is truncated or damaged, or holds a tensor of no float dtype.
    """
    for path in files:
        try:
            for names in batch_by_bytes(_by_size(path)):
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path}: damaged safetensors file: {error}; it may be truncated, download it again"
            ) from error


def _by_size(path: Path) -> list[tuple[int, str]]:
    """(bytes, name) of every tensor, the largest first."""
    sizes = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  the handle is no dict and cannot be iterated
            piece = file.get_slice(name)
            element_bytes = _ELEMENT_BYTES.get(piece.get_dtype())
            if element_bytes is None:
                # Buffers of integers exist in old files; whether one matters is for the loader to say.
                element_bytes = 1
            sizes.append((prod(piece.get_shape()) * element_bytes, name))
    return sorted(sizes, reverse=True)
