"""Places for weights: which Hugging Face name goes into which slice of which tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ksana.errors import ModelLoadError
from ksana.kernels.quantization import QuantizedWeight, Weight, concatenate
from ksana.kernels.weights import Linear

Converter = Callable[[Weight], Weight]
"""What becomes of a weight on its way from the file."""


class Parameters:
    """Allocates weights and fills them by name.

    Several named weights may share a tensor (q, k and v; gate and up): each has its rows of it. Memory that nothing is
    written to, since quantised weights come instead, is never taken from the system.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._slots: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()
        self._projections: list[tuple[Linear, list[str]]] = []
        self._converters: dict[str, Converter] = {}
        self._quantized: dict[str, QuantizedWeight] = {}

    def add(self, name: str, *shape: int) -> torch.Tensor:
        """A weight of its own."""
        return self.add_stacked([(name, shape[0])], *shape[1:])

    def add_offset(self, name: str, size: int) -> torch.Tensor:
        """A vector that the file holds less one; float32, whose digits the sum has and a shorter dtype has not."""
        tensor = self._slots[name] = torch.empty(size, dtype=torch.float32, device=self._device)
        self._converters[name] = _plus_one
        return tensor

    def add_stacked(self, rows_of: list[tuple[str, int]], *rest: int) -> torch.Tensor:
        """One tensor [sum of rows, *rest] whose rows belong to several names, in order."""
        total = sum(rows for _, rows in rows_of)
        tensor = torch.empty(total, *rest, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in rows_of:
            self._slots[name] = tensor[start : start + rows]
            start += rows
        return tensor

    def add_projection(self, rows_of: list[tuple[str, int]], in_features: int, convert: Converter) -> Linear:
        """A projection [sum of rows, in_features].

        If all its parts are quantised alike when they are complete, so is its weight; else all become plain.

        Args:
            convert: applied to each part as it comes, so that only one is there in its former shape.
        """
        linear = Linear(self.add_stacked(rows_of, in_features))
        names = [name for name, _ in rows_of]
        self._projections.append((linear, names))
        self._converters.update(dict.fromkeys(names, convert))
        return linear

    def fill(self, name: str, value: Weight) -> bool:
        """Put ``value`` into its place, casting; False if no place has that name. Raises ModelLoadError on shape."""
        slot = self._slots.get(name)
        if slot is None:
            return False
        if slot.shape != value.shape:
            raise ModelLoadError(
                f"weight {name} has shape {list(value.shape)}, but config.json asks for {list(slot.shape)}"
            )
        if name in self._converters:
            value = self._converters[name](value)
        if isinstance(value, torch.Tensor):
            slot.copy_(value)
        elif name in self._converters:
            self._quantized[name] = value
        else:
            slot.copy_(value.dequantize())
        self._filled.add(name)
        return True

    def __len__(self) -> int:
        return len(self._slots)

    def release(self) -> None:
        """Let go of all weights: they belong to the model's parts, which may pack them into other memory."""
        for linear, names in self._projections:
            parts = {name: self._quantized.pop(name) for name in names if name in self._quantized}
            joined = concatenate(list(parts.values())) if len(parts) == len(names) else None
            if joined is not None:
                linear.weight = joined
                continue
            for name, part in parts.items():
                self._slots[name].copy_(part.dequantize())
        self._projections.clear()
        self._slots.clear()

    def missing(self) -> list[str]:
        """Names that have not been filled."""
        return [name for name in self._slots if name not in self._filled]


def _plus_one(weight: Weight) -> torch.Tensor:
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).float() + 1.0
