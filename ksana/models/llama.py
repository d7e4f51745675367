"""The Llama family: one decoder with the options that its members differ in.

Llama 1 to 3, SmolLM2 and Yi as they are; Mistral adds a sliding window, Qwen2 a bias on q, k and v, Qwen3 a norm on
each head of q and k, Gemma 2 and 3 norms behind attention and MLP, caps, and rotary embeddings that differ by layer.
All of it is in :class:`ModelConfig`, so there is one class.
"""

from __future__ import annotations

import numpy as np
import torch

from ksana.kernels.base import KernelBackend, torch_dtype
from ksana.kernels.batch import ModelInputs, StepContext
from ksana.kernels.quantization import QuantizedWeight, Weight, quantize
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.models.layer_loop import run_layers
from ksana.models.parameters import Parameters
from ksana.models.rope import RotaryTables, compute_inv_freq
from ksana.types.model import ModelConfig, RopeConfig

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)

_DECODER, _HEAD = "model.", "lm_head."
_EMBEDDING = "model.embed_tokens.weight"
_LAYER_BITS = {"int8": 8, "int4": 4}
_HEAD_BITS = {"int8": 8, "int4": 8}
"""By ``ModelConfig.quantization``. The head is what suffers most from few bits."""


class LlamaModel:
    """See :class:`ksana.models.base.Model`.

    Args:
        config: of one of ``ARCHITECTURES``.
        backend: runs the operators and packs the weights.
    """

    def __init__(self, config: ModelConfig, backend: KernelBackend) -> None:
        self.config = config
        self._backend = backend
        self._dtype = torch_dtype(config.dtype)
        self._parameters = Parameters(self._dtype, backend.device)
        self._embedding = Linear(self._parameters.add(_EMBEDDING, config.vocab_size, config.hidden_size))
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self._dtype).item()
        self._ropes = _distinct_ropes(config)
        self._rotary = [self._create_rotary(rope) for rope in self._ropes]
        self._layers = [self._add_layer(index) for index in range(config.num_layers)]
        self._norm = self._add_norm("model.norm", config.hidden_size)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            rows = [("lm_head.weight", config.vocab_size)]
            self._head = self._parameters.add_projection(rows, config.hidden_size, self._convert_head)

    def load_weight(self, name: str, weight: Weight) -> bool:
        if not name.startswith((_DECODER, _HEAD)):
            name = _DECODER + name  # files of embedding models hold the decoder alone
        found = self._parameters.fill(name, weight)
        if name == _EMBEDDING and self.config.tie_word_embeddings:
            head = self._convert_head(weight)
            if isinstance(head, QuantizedWeight):  # the head alone: rows are looked up in a plain table
                self._head = Linear(head)
        return found

    def num_weights(self) -> int:
        return len(self._parameters)

    def finish_loading(self) -> list[str]:
        missing = self._parameters.missing()
        if missing:
            return missing
        self._parameters.release()
        self._norm = self._backend.pack_norm(self._norm)
        for layer in self._layers:
            self._backend.pack_layer(layer)
        if self._head is self._embedding:
            self._head = self._embedding = self._backend.pack_tied_head(self._head)
        else:
            assert self._head.weight is not None
            self._head = self._backend.pack_linear(self._head.weight, self._head.bias)
        return []

    def rotary_tables(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [tables.at(positions) for tables in self._rotary]

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        hidden = self._backend.embed(inputs.token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        for start, rows in inputs.embedding_rows:
            hidden[start : start + len(rows)] = rows
        return run_layers(self._backend, hidden, self._layers, context, inputs.output_rows)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._backend.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._backend.logits(hidden, self._head, self.config.logits_soft_cap)

    def likeliest(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        return self._backend.likeliest(hidden, self._head, self.config.logits_soft_cap)

    def _convert_layer(self, weight: Weight) -> Weight:
        return self._converted(weight, _LAYER_BITS)

    def _convert_head(self, weight: Weight) -> Weight:
        return self._converted(weight, _HEAD_BITS)

    def _converted(self, weight: Weight, bits: dict[str, int]) -> Weight:
        kind = self.config.quantization
        if kind not in bits or isinstance(weight, QuantizedWeight):
            return weight
        return quantize(weight, bits[kind], self.config.quantization_group_size, self._dtype)

    def _add_layer(self, index: int) -> DecoderLayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        # Where what attention gives is normed itself, that norm has the name which elsewhere is the MLP's.
        mlp_input_norm = "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"
        layer = DecoderLayerWeights(
            input_norm=self._add_norm(f"{prefix}.input_layernorm", config.hidden_size),
            attention=self._add_attention(index, f"{prefix}.self_attn"),
            mlp_input_norm=self._add_norm(f"{prefix}.{mlp_input_norm}", config.hidden_size),
            mlp=self._add_mlp(f"{prefix}.mlp"),
            eps=config.rms_norm_eps,
        )
        if config.output_norms:
            layer.attention_output_norm = self._add_norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
            layer.mlp_output_norm = self._add_norm(f"{prefix}.post_feedforward_layernorm", config.hidden_size)
        return layer

    def _add_attention(self, index: int, prefix: str) -> AttentionWeights:
        config = self.config
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        rows = [(f"{prefix}.q_proj", query_size), (f"{prefix}.k_proj", kv_size), (f"{prefix}.v_proj", kv_size)]
        return AttentionWeights(
            qkv=self._add_linear(rows, config.hidden_size, config.qkv_bias),
            output=self._add_linear([(f"{prefix}.o_proj", config.hidden_size)], query_size, config.output_bias),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5 if config.attention_scale is None else config.attention_scale,
            layer_index=index,
            rotary_index=self._ropes.index(config.layer_ropes[index] if config.layer_ropes else config.rope),
            q_norm=self._add_norm(f"{prefix}.q_norm", config.head_size) if config.qk_norm else None,
            k_norm=self._add_norm(f"{prefix}.k_norm", config.head_size) if config.qk_norm else None,
            soft_cap=config.attention_soft_cap,
            kv_scale=config.kv_scales[index] if config.kv_scales else 1.0,
        )

    def _add_mlp(self, prefix: str) -> GatedMLPWeights:
        config = self.config
        rows = [(f"{prefix}.gate_proj", config.intermediate_size), (f"{prefix}.up_proj", config.intermediate_size)]
        return GatedMLPWeights(
            gate_up=self._add_linear(rows, config.hidden_size, config.mlp_bias),
            down=self._add_linear(
                [(f"{prefix}.down_proj", config.hidden_size)], config.intermediate_size, config.mlp_bias
            ),
            activation=config.activation,
        )

    def _add_norm(self, name: str, size: int) -> torch.Tensor:
        add = self._parameters.add_offset if self.config.unit_offset_norms else self._parameters.add
        return add(f"{name}.weight", size)

    def _add_linear(self, rows_of: list[tuple[str, int]], in_features: int, has_bias: bool) -> Linear:
        weights = [(f"{name}.weight", rows) for name, rows in rows_of]
        linear = self._parameters.add_projection(weights, in_features, self._convert_layer)
        if has_bias:
            linear.bias = self._parameters.add_stacked([(f"{name}.bias", rows) for name, rows in rows_of])
        return linear

    def _create_rotary(self, rope: RopeConfig) -> RotaryTables:
        config = self.config
        return RotaryTables(*compute_inv_freq(rope, config.head_size, config.max_model_len), self._dtype)


def _distinct_ropes(config: ModelConfig) -> list[RopeConfig]:
    """The rotary embeddings that the model's layers have, in the order of the first layers that have them."""
    distinct: list[RopeConfig] = []
    for rope in config.layer_ropes or (config.rope,):
        if rope not in distinct:
            distinct.append(rope)
    return distinct
