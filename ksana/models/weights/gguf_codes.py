"""Quantised blocks of GGUF files taken apart: integers, and constants for every 32 of them, without a float between.

Of the file's formats, those are here whose elements are ``scale * code + minimum`` with codes of 4 bits, or
``scale * code`` with codes of 8; nothing is lost or rounded. numpy alone: torch may not be imported yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Array = npt.NDArray[Any]

GROUP_SIZE = 32
"""Elements that share their constants, in every one of the formats."""

_Parts = tuple[Array, Array, "Array | None"]


@dataclass(frozen=True, slots=True)
class GGUFCodes:
    """A matrix in the parts of :class:`ksana.kernels.quantization.QuantizedWeight`, as numpy arrays."""

    bits: int
    codes: Array
    scales: Array
    minima: Array | None

    def each(self, change: Callable[[Array], Array]) -> GGUFCodes:
        """The same after a change of the order of rows."""
        minima = None if self.minima is None else change(self.minima)
        return GGUFCodes(self.bits, change(self.codes), change(self.scales), minima)


class CodeReader:
    """Takes a matrix apart, some rows at a time.

    Args:
        kind: one of those that :func:`keeps_codes` says yes to.
        num_rows, num_columns: of the matrix.
    """

    def __init__(self, kind: GGMLQuantizationType, num_rows: int, num_columns: int) -> None:
        self._bits, self._split = _FORMATS[kind]
        self._block_bytes = GGML_QUANT_SIZES[kind][1]
        code = np.int8 if self._bits == 8 else np.uint8
        self._codes = np.empty((num_rows, num_columns), code)
        self._scales, self._minima = (np.empty((num_rows, num_columns // GROUP_SIZE), np.float32) for _ in range(2))

    def put(self, start: int, rows: npt.NDArray[np.uint8]) -> None:
        """Take apart the encoded ``rows`` [n, bytes], which are the matrix's from ``start`` on."""
        stop = start + len(rows)
        # Scales or minima that are no numbers show in the products, as in any other weight.
        with np.errstate(invalid="ignore", over="ignore"):
            codes, scales, minima = self._split(rows.reshape(-1, self._block_bytes))
        self._codes[start:stop] = codes.reshape(stop - start, -1)
        self._scales[start:stop] = scales.reshape(stop - start, -1)
        if minima is not None:
            self._minima[start:stop] = minima.reshape(stop - start, -1)

    def result(self) -> GGUFCodes:
        """The matrix, once all rows are in."""
        return GGUFCodes(self._bits, self._codes, self._scales, self._minima if self._bits == 4 else None)


def keeps_codes(kind: GGMLQuantizationType) -> bool:
    """Whether the format's integers can be used as they are."""
    return kind in _FORMATS


def encoded_size(kind: GGMLQuantizationType, num_elements: int) -> int:
    """Bytes of a matrix's :class:`GGUFCodes`."""
    constants = 1 if _FORMATS[kind][0] == 8 else 2
    return num_elements + num_elements // GROUP_SIZE * 4 * constants


def _floats(blocks: Array, start: int, stop: int) -> Array:
    """Numbers of 16 bits in each block, as float32."""
    numbers: Array = np.ascontiguousarray(blocks[:, start:stop]).view(np.float16).astype(np.float32)
    return numbers


def _nibbles(data: Array) -> Array:
    """Low halves of the bytes [..., n], then the high ones: [..., 2, n]."""
    return np.stack((data & 15, data >> 4), axis=-2)


def _split_q8_0(blocks: Array) -> _Parts:
    """One scale, 32 signed integers."""
    return blocks[:, 2:].view(np.int8), _floats(blocks, 0, 2), None


def _split_q4_0(blocks: Array) -> _Parts:
    """One scale, 32 integers less 8."""
    scales = _floats(blocks, 0, 2)
    return _nibbles(blocks[:, 2:]), scales, scales * -8


def _split_q4_1(blocks: Array) -> _Parts:
    """A scale, a minimum, 32 integers."""
    constants = _floats(blocks, 0, 4)
    return _nibbles(blocks[:, 4:]), constants[:, 0], constants[:, 1]


def _split_q4_k(blocks: Array) -> _Parts:
    """Eight groups whose scales and minima are integers of six bits, times two constants of the block."""
    constants = _floats(blocks, 0, 4)
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (rest & 15) | (low >> 6) << 4), axis=1)
    minima = np.concatenate((high & 63, (rest >> 4) | (high >> 6) << 4), axis=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes, constants[:, :1] * scales, constants[:, 1:] * -minima.astype(np.float32)


_FORMATS: dict[GGMLQuantizationType, tuple[int, Callable[[Array], _Parts]]] = {
    GGMLQuantizationType.Q8_0: (8, _split_q8_0),
    GGMLQuantizationType.Q4_0: (4, _split_q4_0),
    GGMLQuantizationType.Q4_1: (4, _split_q4_1),
    GGMLQuantizationType.Q4_K: (4, _split_q4_k),
}
"""Bits of a code, and how to take blocks [n, bytes] apart."""
