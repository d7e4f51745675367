"""Weights as small integers with constants for every group of neighbours in a row, and the rounding that makes them.

Only weights are quantised: activations, norms and the embedding's lookup keep the model's dtype. A backend that
multiplies such weights reads a half or a quarter of the bytes; any other gets them back as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_CHUNK_ELEMENTS = 2**18
"""Elements in work at a time: their float32 copies stay in the processor's caches, and memory stays flat."""

_LEAST_NORMAL = torch.finfo(torch.float32).tiny

_INT4_SHRINKS = (1.0, 0.92, 0.85, 0.78)
"""Parts of a group's range that are tried for the sixteen values of int4. Leaving the outermost weights outside makes
the steps between all others smaller."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out_features, in_features] whose elements are ``scale * code + minimum``.

    Attributes:
        bits: 8 or 4.
        group_size: elements of a row that share their constants; the last group of a row may be shorter.
        codes: [out_features, in_features]: int8 for 8 bits; for 4 bits uint8, from 0 to 15, one a byte.
        scales: float32 [out_features, groups].
        minima: float32 [out_features, groups] for 4 bits, None for 8.
        dtype: of the activations that the matrix is multiplied with, and of the tensor that it stands for.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.minima) if part is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix as a tensor of ``dtype`` (default: its own), each element rounded once from float32."""
        plain = torch.empty(self.shape, dtype=dtype or self.dtype)
        for rows in _row_chunks(self.shape):
            values = self.codes[rows].float() * self._by_element(self.scales[rows])
            if self.minima is not None:
                values += self._by_element(self.minima[rows])
            plain[rows] = values
        return plain

    def _by_element(self, constants: torch.Tensor) -> torch.Tensor:
        return constants.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]


Weight = torch.Tensor | QuantizedWeight
"""A matrix as files hold it and projections take it."""


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The rows of all ``parts``, one below the other; None if they are not quantised alike."""
    first = parts[0]
    if any((part.bits, part.group_size) != (first.bits, first.group_size) for part in parts):
        return None
    if len(parts) == 1:
        return first
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedWeight(
        first.bits,
        first.group_size,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
        first.dtype,
    )


def quantize(weight: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype) -> QuantizedWeight:
    """Round a matrix: to int8 around zero, or to int4 between two bounds with a small squared error.

    Args:
        weight: [out_features, in_features] of any float dtype, on the CPU. A group that holds NaN or infinity gets
            constants that are not finite, and so shows in every product.
        bits: 8 or 4.
        group_size, dtype: see :class:`QuantizedWeight`.
    """
    num_rows, num_columns = weight.shape
    num_groups = -(-num_columns // group_size)
    codes = torch.empty(num_rows, num_columns, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.empty(num_rows, num_groups)
    minima = None if bits == 8 else torch.empty(num_rows, num_groups)
    for rows in _row_chunks(weight.shape):
        for columns, groups in _equal_groups(num_columns, group_size):
            part = weight[rows, columns].float()
            values = part.view(len(part), groups.stop - groups.start, -1)
            if minima is None:
                found, scales[rows, groups] = _round_to_int8(values)
            else:
                found, scales[rows, groups], minima[rows, groups] = _round_to_int4(values)
            codes[rows, columns] = found.flatten(1)
    return QuantizedWeight(bits, group_size, codes, scales, minima, dtype)


def _equal_groups(num_columns: int, group_size: int) -> Iterator[tuple[slice, slice]]:
    """(columns, groups) of the groups of full size, and of the shorter one at the end."""
    count = num_columns // group_size
    if count:
        yield slice(0, count * group_size), slice(0, count)
    if num_columns % group_size:
        yield slice(count * group_size, num_columns), slice(count, count + 1)


def _row_chunks(shape: torch.Size) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def _round_to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [..., groups, size], scales [..., groups]). A search for better scales gains nothing measurable."""
    scales = values.abs().amax(dim=-1) / 127
    return (values * _inverse(scales)[..., None]).round_().clamp_(-127, 127), scales


def _round_to_int4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [..., groups, size], scales [..., groups], minima [..., groups]).

    Each candidate range gives codes, and those the constants that fit them best in least squares.
    """
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    middle, step = (low + high) / 2, (high - low) / 15
    best = _fit(values, _codes(values, step, low))
    for shrink in _INT4_SHRINKS[1:]:
        fitted = _fit(values, _codes(values, step * shrink, middle - step * (7.5 * shrink)))
        better = fitted[2] > best[2]
        best = tuple(torch.where(better, new, old) for new, old in zip(fitted, best, strict=True))
    codes = _codes(values, best[0], best[1])
    scales, minima, _ = _fit(values, codes)
    return codes, scales, minima


def _codes(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    inverse = _inverse(scales)
    offset = -minima * inverse
    return torch.addcmul(offset[..., None], values, inverse[..., None]).round_().clamp_(0, 15)


def _fit(values: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scale and minimum of each group by least squares, and how much of the spread of its values they explain."""
    mean_code, mean_value = codes.mean(dim=-1), values.mean(dim=-1)
    size = values.shape[-1]
    variance = torch.linalg.vecdot(codes, codes) / size - mean_code * mean_code
    covariance = torch.linalg.vecdot(codes, values) / size - mean_code * mean_value
    scales = covariance * _inverse(variance)
    return scales, mean_value - scales * mean_code, scales * covariance


def _inverse(numbers: torch.Tensor) -> torch.Tensor:
    """1 / x, and 0 of what is 0 or nearly so: a group of equal weights has no scale, and 1 / x must not overflow."""
    return torch.where(numbers.abs() < _LEAST_NORMAL, 0.0, 1.0 / numbers)
