"""Qwen 2, 2.5 and 3."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from ksana.models.families.base import FamilyOptions, LayerTypes, TokenIds, windows_of
from ksana.models.families.llama import LlamaFields


class Qwen2Fields(LlamaFields):
    """Biases on q, k and v; windows on the upper layers, if at all."""

    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32768
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = Field(28, ge=0)
    layer_types: LayerTypes | None = None

    def options(self) -> FamilyOptions:
        """A bias on q, k and v, always."""
        return {"qkv_bias": True}

    def sliding_windows(self) -> list[int | None]:
        """``layer_types`` says which layers have the window; without it, those from ``max_window_layers`` on."""
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is None:
            full = min(self.max_window_layers, self.num_hidden_layers)
            return [None] * full + [window] * (self.num_hidden_layers - full)
        return windows_of(self.layer_types, window)


class Qwen3Fields(Qwen2Fields):
    """RMSNorm on the heads of q and k; biases optional."""

    head_dim: PositiveInt | None = 128

    def options(self) -> FamilyOptions:
        """Biases as ``attention_bias`` says."""
        return {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias, "qk_norm": True}
