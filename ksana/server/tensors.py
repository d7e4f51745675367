"""Arrays on their way out: base64 of their elements, shape, and dtype."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def encode_tensor(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """The object that stands for an array.

    Args:
        array: float32.
        dtype: ``float32``, ``float16`` or ``bfloat16``, to which it is rounded.

    Returns:
        ``data``: base64 of the elements in row-major order, little-endian; ``shape``; ``dtype``.
    """
    elements = _to_bfloat16(array) if dtype == "bfloat16" else array.astype("<f2" if dtype == "float16" else "<f4")
    return {"data": base64.b64encode(np.ascontiguousarray(elements).data), "shape": list(array.shape), "dtype": dtype}


def _to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, rounded to nearest, ties to even: numpy has no such dtype."""
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded: np.ndarray = ((bits + rounding) >> 16).astype("<u2")
    return rounded
