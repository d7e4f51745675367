"""Gemma 2 and 3, their text models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ksana.models.families.base import (
    DEFAULT_ROPE_THETA,
    DecoderFields,
    FamilyOptions,
    LayerTypes,
    TokenIds,
    merge_rope_settings,
    windows_of,
)


class Gemma2Fields(DecoderFields):
    """Layers with and without a window in turns, four norms a layer, caps on scores and logits.

    Files of the larger models, whose text part is one among several, state little more than sizes: everything has a
    default.
    """

    vocab_size: PositiveInt = 256_000
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: PositiveInt = Field(26, le=10_000)
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    hidden_activation: Literal["gelu_pytorch_tanh"] | None = "gelu_pytorch_tanh"
    max_position_embeddings: PositiveInt = 8192
    tie_word_embeddings: bool = True
    bos_token_id: TokenIds = 2
    eos_token_id: TokenIds = 1
    attention_bias: bool = False
    query_pre_attn_scalar: PositiveFloat = 256.0
    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt = 2
    layer_types: LayerTypes | None = None
    use_bidirectional_attention: Literal[False] | None = None

    def options(self) -> FamilyOptions:
        """Everything that makes it a Gemma."""
        return {
            "qkv_bias": self.attention_bias,
            "output_bias": self.attention_bias,
            "activation": "gelu_tanh",
            "unit_offset_norms": True,
            "output_norms": True,
            "embedding_scale": self.hidden_size**0.5,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "attention_soft_cap": self.attn_logit_softcapping or 0.0,
            "logits_soft_cap": self.final_logit_softcapping or 0.0,
        }

    def sliding_windows(self) -> list[int | None]:
        """Without ``layer_types``, all layers have the window but the last of every ``sliding_window_pattern``."""
        if self.layer_types is not None:
            return windows_of(self.layer_types, self.sliding_window)
        layers = range(1, self.num_hidden_layers + 1)
        return [self.sliding_window if layer % self.sliding_window_pattern else None for layer in layers]


class Gemma3Fields(Gemma2Fields):
    """Five layers with a window for one without, norms of q and k instead of caps, and two rotary embeddings.

    A file names them in one of two ways: ``rope_theta`` and ``rope_scaling`` of the layers that see everything beside
    ``rope_local_base_freq`` of the others, or ``rope_parameters`` with an entry for each kind of layer.
    """

    vocab_size: PositiveInt = 262_208
    max_position_embeddings: PositiveInt = 131_072
    rope_theta: PositiveFloat | None = 1_000_000.0
    rope_local_base_freq: PositiveFloat = DEFAULT_ROPE_THETA
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    sliding_window_pattern: PositiveInt = 6

    def options(self) -> FamilyOptions:
        """Those of Gemma 2, and the norms of q and k."""
        return {**super().options(), "qk_norm": True}

    def rope_settings(self) -> dict[str, Any] | None:
        """Those of layers that see everything."""
        return merge_rope_settings(self._rope_parameters("full_attention"), self.rope_scaling)

    def local_rope_settings(self) -> dict[str, Any] | None:
        """Those of layers with a window, which no scaling applies to that does not name them."""
        return {"rope_theta": self.rope_local_base_freq, **self._rope_parameters("sliding_attention")}

    def _rope_parameters(self, kind: str) -> dict[str, Any]:
        parameters = (self.rope_parameters or {}).get(kind)
        return parameters if isinstance(parameters, dict) else {}
