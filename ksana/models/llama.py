"""The Llama family: one decoder with the options that its members differ in.

Llama 1 to 3, SmolLM2 and Yi as they are; Mistral adds a sliding window, Qwen2 a bias on q, k and v, Qwen3 a norm on
each head of q and k. All of it is in :class:`ModelConfig`, so there is one class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ksana.kernels.base import KernelBackend, torch_dtype
from ksana.kernels.batch import ModelInputs, StepContext
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.models.parameters import Parameters
from ksana.models.rope import compute_inv_freq
from ksana.types.model import ModelConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


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
        self._embedding = self._parameters.add("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._add_layer(index) for index in range(config.num_layers)]
        self._norm = self._parameters.add("model.norm.weight", config.hidden_size)
        head = self._embedding
        if not config.tie_word_embeddings:
            head = self._parameters.add("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = Linear(head)
        inv_freq, self._rope_scale = compute_inv_freq(config.rope, config.head_size, config.max_model_len)
        self._inv_freq = inv_freq.to(backend.device)

    def load_weight(self, name: str, tensor: torch.Tensor) -> bool:
        return self._parameters.fill(name, tensor)

    def num_weights(self) -> int:
        return len(self._parameters)

    def finish_loading(self) -> list[str]:
        missing = self._parameters.missing()
        if missing:
            return missing
        self._parameters.release()
        for layer in self._layers:
            attention, mlp = layer.attention, layer.mlp
            attention.qkv = self._pack(attention.qkv)
            attention.output = self._pack(attention.output)
            mlp.gate_up = self._pack(mlp.gate_up)
            mlp.down = self._pack(mlp.down)
        if not self.config.tie_word_embeddings:  # a tied head is read as the embedding too
            self._head = self._pack(self._head)
        return []

    def _pack(self, linear: Linear) -> Linear:
        assert linear.weight is not None
        return self._backend.pack_linear(linear.weight, linear.bias)

    def rotary_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        cos = torch.cat((cos, cos), dim=-1)[:, None].to(self._dtype)
        return cos, torch.cat((-sin, sin), dim=-1)[:, None].to(self._dtype)

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        hidden = F.embedding(inputs.token_ids, self._embedding)
        for start, rows in inputs.embedding_rows:
            hidden[start : start + len(rows)] = rows
        for layer in self._layers:
            hidden = self._backend.decoder_layer(hidden, layer, context)
        return self._backend.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._backend.linear(hidden, self._head).float()

    def _add_layer(self, index: int) -> DecoderLayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        return DecoderLayerWeights(
            input_norm=self._parameters.add(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=self._add_attention(index, f"{prefix}.self_attn"),
            post_attention_norm=self._parameters.add(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            mlp=self._add_mlp(f"{prefix}.mlp"),
            eps=config.rms_norm_eps,
        )

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
            scale=config.head_size**-0.5,
            layer_index=index,
            q_norm=self._parameters.add(f"{prefix}.q_norm.weight", config.head_size) if config.qk_norm else None,
            k_norm=self._parameters.add(f"{prefix}.k_norm.weight", config.head_size) if config.qk_norm else None,
        )

    def _add_mlp(self, prefix: str) -> GatedMLPWeights:
        config = self.config
        rows = [(f"{prefix}.gate_proj", config.intermediate_size), (f"{prefix}.up_proj", config.intermediate_size)]
        return GatedMLPWeights(
            gate_up=self._add_linear(rows, config.hidden_size, config.mlp_bias),
            down=self._add_linear(
                [(f"{prefix}.down_proj", config.hidden_size)], config.intermediate_size, config.mlp_bias
            ),
        )

    def _add_linear(self, rows_of: list[tuple[str, int]], in_features: int, has_bias: bool) -> Linear:
        weight = self._parameters.add_stacked([(f"{name}.weight", rows) for name, rows in rows_of], in_features)
        bias = None
        if has_bias:
            bias = self._parameters.add_stacked([(f"{name}.bias", rows) for name, rows in rows_of])
        return Linear(weight, bias)
