"""Weights of the parts of a decoder layer, in the form that backend operators take them.

Models fill these once; a backend may pack any of them in its own way (:meth:`KernelBackend.pack_linear`), and fuse as
much as it likes, since its operators receive whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ksana.kernels.quantization import Weight


@dataclass(slots=True)
class Linear:
    """A projection ``y = x @ weight.T + bias``.

    Attributes:
        weight: [out_features, in_features]; quantised only until it is packed; None if the backend keeps it in
            ``packed`` alone.
        bias: [out_features] or None.
        packed: whatever the backend made of it; None if it uses ``weight`` as it is.
    """

    weight: Weight | None
    bias: torch.Tensor | None = None
    packed: Any = None


@dataclass(slots=True)
class AttentionWeights:
    """Self attention with grouped queries.

    Attributes:
        qkv: projection to q, k and v, in this order: [(num_heads + 2 * num_kv_heads) * head_size, hidden_size].
        output: [hidden_size, num_heads * head_size].
        q_norm, k_norm: [head_size] RMSNorm weights applied to each head before the rotary embedding, or None.
        layer_index: position of the layer in the model, and so of its cache.
        rotary_index: which of :attr:`StepContext.rotary` turns q and k.
        kv_scale: what keys and values are divided by in a cache of eight bits; 1 for any other cache.
        soft_cap: scores are bent to ``soft_cap * tanh(score / soft_cap)`` before the softmax; 0 for none.
    """

    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    layer_index: int
    rotary_index: int = 0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    soft_cap: float = 0.0
    kv_scale: float = 1.0


@dataclass(slots=True)
class GatedMLPWeights:
    """``down(act(gate(x)) * up(x))``.

    Attributes:
        gate_up: gate above up: [2 * intermediate_size, hidden_size].
        down: [hidden_size, intermediate_size].
        activation: ``silu`` or ``gelu_tanh``; see :class:`ksana.types.model.ModelConfig`.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"


@dataclass(slots=True)
class DecoderLayerWeights:
    """A pre-norm transformer layer: norm, attention, norm, MLP, with residual connections.

    Norm weights are [hidden_size], of the activations' dtype or, if they need more digits than that has, float32.

    Attributes:
        input_norm, mlp_input_norm: RMSNorm weights in front of attention and MLP.
        eps: of every RMSNorm in the layer.
        attention_output_norm, mlp_output_norm: RMSNorm weights of what attention and MLP add to the residual stream, or
            None.
        packed: what the backend made of the whole layer; None if it works from the parts.
    """

    input_norm: torch.Tensor
    attention: AttentionWeights
    mlp_input_norm: torch.Tensor
    mlp: GatedMLPWeights
    eps: float
    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None
    packed: Any = None
