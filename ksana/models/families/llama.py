"""Llama 1 to 3, and what is called so: SmolLM2, Yi."""

from __future__ import annotations

from typing import Literal

from ksana.models.families.base import DecoderFields, FamilyOptions, TokenIds


class LlamaFields(DecoderFields):
    """Biases optional."""

    hidden_act: Literal["silu", "swish"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: TokenIds = 1
    eos_token_id: TokenIds = 2

    def options(self) -> FamilyOptions:
        """Biases, as the config says."""
        return {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
