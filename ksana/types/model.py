"""The typed description of a decoder-only model that loaders, models and the KV cache share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: ``default``, ``linear``, ``dynamic`` (NTK), ``llama3`` or ``yarn``.
        parameters: the numbers of the scaling kind under their Hugging Face names (``factor``,
            ``original_max_position_embeddings``, ``low_freq_factor``, ``beta_fast``, ``mscale``, ...).
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama shape, and what families have added to it.

    Attributes:
        architecture: Hugging Face class name, for example ``LlamaForCausalLM``; chooses the model class.
        name: short name for people: the folder or file it came from.
        vocab_size: rows of the embedding, padding rows included.
        head_size: elements of one attention head (not always hidden_size / num_heads).
        max_model_len: most tokens of prompt and output together that the model was made for.
        dtype: ``float32``, ``bfloat16`` or ``float16``: of weights, activations and KV cache.
        rope: rotary embedding of every layer, unless ``layer_ropes`` says otherwise.
        layer_ropes: one entry a layer, for models whose layers differ in it (Gemma 3).
        qkv_bias, output_bias, mlp_bias: whether those projections carry a bias.
        qk_norm: RMSNorm over each head of q and k before the rotary embedding (Qwen3, Gemma 3).
        activation: of the gate in the MLP: ``silu``, or ``gelu_tanh`` for GELU in its tanh approximation (Gemma).
        unit_offset_norms: files hold the weights of RMSNorms less one (Gemma).
        output_norms: what attention and MLP give is normed too before it is added to the residual stream (Gemma).
        embedding_scale: factor of embedded tokens (Gemma).
        attention_scale: factor of the scores; None for head_size ** -0.5.
        attention_soft_cap, logits_soft_cap: scores, and the model's logits, are bent to ``cap * tanh(x / cap)``
            (Gemma 2); 0 for none.
        sliding_windows: one entry a layer: window size in tokens, or None for full attention.
        eos_token_ids: tokens that end a sequence.
        quantization: what becomes of projections' weights: ``none`` (plain, of ``dtype``), ``int8`` or ``int4``
            (rounded while they are loaded), ``stored`` (as the file holds them, if it holds integers).
        quantization_group_size: elements that share a scale, for ``int8`` and ``int4``.
        kv_scales: for each layer, what keys and values are divided by in a cache of eight bits; empty if that is 1.
        pooling: how the states of tokens become the embedding of a text: ``last`` takes the last token's, ``cls`` the
            first one's, ``mean`` their mean; any other name is that of a way which is not supported.
        generation_defaults: sampling values from ``generation_config.json`` (temperature, top_k, top_p).
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    dtype: str
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    layer_ropes: tuple[RopeConfig, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    unit_offset_norms: bool = False
    output_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    sliding_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str = "none"
    quantization_group_size: int = 64
    kv_scales: tuple[float, ...] = ()
    pooling: str = "last"
    generation_defaults: dict[str, float] = field(default_factory=dict)
