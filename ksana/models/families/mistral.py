"""Mistral 7B and its kin."""

from __future__ import annotations

from pydantic import PositiveInt

from ksana.models.families.base import FamilyOptions
from ksana.models.families.llama import LlamaFields


class MistralFields(LlamaFields):
    """One window for all layers, no biases."""

    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 4096 * 32
    sliding_window: PositiveInt | None = 4096

    def options(self) -> FamilyOptions:
        """None."""
        return {}

    def sliding_windows(self) -> list[int | None]:
        """The same window everywhere."""
        return [self.sliding_window] * self.num_hidden_layers
