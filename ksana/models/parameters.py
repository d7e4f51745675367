"""Places for weights: which Hugging Face name goes into which slice of which tensor."""

from __future__ import annotations

import torch

from ksana.errors import ModelLoadError


class Parameters:
    """Allocates weights and fills them by name.

    Several named weights may share a tensor (q, k and v; gate and up): each has its rows of it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._slots: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()

    def add(self, name: str, *shape: int) -> torch.Tensor:
        """A weight of its own."""
        return self.add_stacked([(name, shape[0])], *shape[1:])

    def add_stacked(self, rows_of: list[tuple[str, int]], *rest: int) -> torch.Tensor:
        """One tensor [sum of rows, *rest] whose rows belong to several names, in order."""
        total = sum(rows for _, rows in rows_of)
        tensor = torch.empty(total, *rest, dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in rows_of:
            self._slots[name] = tensor[start : start + rows]
            start += rows
        return tensor

    def fill(self, name: str, value: torch.Tensor) -> bool:
        """Copy ``value`` into its place, casting; False if no place has that name. Raises ModelLoadError on shape."""
        slot = self._slots.get(name)
        if slot is None:
            return False
        if slot.shape != value.shape:
            raise ModelLoadError(
                f"weight {name} has shape {list(value.shape)}, but config.json asks for {list(slot.shape)}"
            )
        slot.copy_(value)
        self._filled.add(name)
        return True

    def __len__(self) -> int:
        return len(self._slots)

    def release(self) -> None:
        """Let go of all weights: they belong to the model's parts, which may pack them into other memory."""
        self._slots.clear()

    def missing(self) -> list[str]:
        """Names that have not been filled."""
        return [name for name in self._slots if name not in self._filled]
