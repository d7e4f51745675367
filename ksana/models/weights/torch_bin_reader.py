"""Weights from PyTorch ``.bin`` files: tensors only, never arbitrary pickles."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ksana.errors import ModelLoadError
from ksana.models.weights.batches import batch_by_bytes
from ksana.models.weights.shards import find_weight_files

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"


def find_files(folder: Path) -> list[Path]:
    """The PyTorch weight files of a model folder; empty if it has none."""
    return find_weight_files(folder, SINGLE_FILE, INDEX_FILE)


def iter_weights(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``files``, the largest of each file first.

    Raises:
        ModelLoadError: a file is truncated or damaged, or holds anything but tensors.
    """
    for path in files:
        sizes = sorted(((tensor.nbytes, name) for name, tensor in _load(path).items()), reverse=True)
        for names in batch_by_bytes(sizes):
            state = _load(path)
            for name in names:
                yield name, state.pop(name)


def _load(path: Path) -> dict[str, torch.Tensor]:
    state = _unpickle(path)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise ModelLoadError(f"{path}: must hold a dictionary of tensors and nothing else")
    return state


def _unpickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        # Files from before PyTorch 1.6 are no zip archives and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, KeyError) as error:
        raise ModelLoadError(
            f"{path}: damaged, or holds other objects than tensors, which are not loaded because they can run code"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ModelLoadError(f"{path}: damaged PyTorch file: {error}; it may be truncated") from error
