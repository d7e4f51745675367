"""What all families have in common, and what they may differ in."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

DEFAULT_ROPE_THETA = 10000.0

TokenIds = int | list[int] | None
LayerTypes = list[Literal["full_attention", "sliding_attention"]]


class FamilyOptions(TypedDict, total=False):
    """Fields of :class:`ksana.types.model.ModelConfig` in which families differ."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: str
    unit_offset_norms: bool
    output_norms: bool
    embedding_scale: float
    attention_scale: float
    attention_soft_cap: float
    logits_soft_cap: float


class DecoderFields(BaseModel):
    """The keys of all families."""

    model_config = ConfigDict(extra="ignore", strict=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt = Field(le=10_000)
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = Field(None, ge=1.0, le=1.0)
    tie_word_embeddings: bool = False
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    def options(self) -> FamilyOptions:
        """What is not as in the plainest Llama."""
        return {}

    def sliding_windows(self) -> list[int | None]:
        """Window of every layer."""
        return [None] * self.num_hidden_layers

    def rope_settings(self) -> dict[str, Any] | None:
        """The settings in force if a file holds ``rope_parameters``, ``rope_scaling`` or both."""
        return merge_rope_settings(self.rope_parameters, self.rope_scaling)

    def local_rope_settings(self) -> dict[str, Any] | None:
        """Those of layers with a sliding window, where they have a rotary embedding of their own."""
        return None


def merge_rope_settings(parameters: dict[str, Any] | None, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """One of the two spellings, or both as one.

    Libraries write one of the two. Where there are both, somebody has added ``rope_scaling`` by hand, as model cards
    ask for long texts; it goes before, as in transformers, but changes no base frequency that it does not name.
    """
    if not scaling:
        return parameters
    theta = (parameters or {}).get("rope_theta")
    return scaling if theta is None else {"rope_theta": theta, **scaling}


def windows_of(layer_types: LayerTypes, window: int | None) -> list[int | None]:
    """Windows of layers whose kinds are listed, as ``layer_types`` does."""
    return [window if kind == "sliding_attention" else None for kind in layer_types]
