"""A digest that tells checkpoints apart, in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = {".safetensors", ".bin", ".gguf"}
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def digest_weights(model_path: Path) -> str:
    """Name, size and samples of the content of every weight file, as 32 hexadecimal digits.

    Copies of a checkpoint have the same digest, whenever and wherever they were made. Other weights have another one:
    training changes all tensors, and the samples lie all over them.

    Args:
        model_path: a folder or a file.
    """
    files = [model_path]
    if model_path.is_dir():
        files = sorted(path for path in model_path.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
