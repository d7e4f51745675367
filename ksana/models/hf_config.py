"""``config.json`` and ``generation_config.json`` of a Hugging Face model folder, read into :class:`ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from ksana.errors import ModelLoadError
from ksana.models.hf_pooling import read_pooling
from ksana.models.hf_rope import read_rope
from ksana.models.json_file import read_json_object
from ksana.types.model import ModelConfig

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

DEFAULT_ROPE_THETA = 10000.0

TokenIds = int | list[int] | None


class Projections(TypedDict, total=False):
    """What the attention and MLP projections have beside their matrices, as fields of :class:`ModelConfig`."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


class LlamaFields(BaseModel):
    """The keys that all architectures share.

    Defaults are those of the Hugging Face class: a ``config.json`` may leave out what equals them.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt = Field(le=10_000)
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = Field(None, ge=1.0, le=1.0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: TokenIds = 1
    eos_token_id: TokenIds = 2
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    def projections(self) -> Projections:
        """Biases, as the config says."""
        return {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias, "mlp_bias": self.mlp_bias}

    def sliding_windows(self) -> list[int | None]:
        """Window of every layer."""
        return [None] * self.num_hidden_layers


class MistralFields(LlamaFields):
    """One window for all layers, no biases."""

    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 4096 * 32
    sliding_window: PositiveInt | None = 4096

    def projections(self) -> Projections:
        """None."""
        return {}

    def sliding_windows(self) -> list[int | None]:
        """The same window everywhere."""
        return [self.sliding_window] * self.num_hidden_layers


class Qwen2Fields(LlamaFields):
    """Biases on q, k and v; windows on the upper layers, if at all."""

    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32768
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = Field(28, ge=0)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def projections(self) -> Projections:
        """On q, k and v, always."""
        return {"qkv_bias": True}

    def sliding_windows(self) -> list[int | None]:
        """``layer_types`` says which layers have the window; without it, those from ``max_window_layers`` on."""
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is None:
            full = min(self.max_window_layers, self.num_hidden_layers)
            return [None] * full + [window] * (self.num_hidden_layers - full)
        return [window if kind == "sliding_attention" else None for kind in self.layer_types]


class Qwen3Fields(Qwen2Fields):
    """RMSNorm on the heads of q and k; biases optional."""

    head_dim: PositiveInt | None = 128

    def projections(self) -> Projections:
        """As ``attention_bias`` says."""
        return {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias, "qk_norm": True}


ARCHITECTURES: dict[str, type[LlamaFields]] = {
    "LlamaForCausalLM": LlamaFields,
    "MistralForCausalLM": MistralFields,
    "Qwen2ForCausalLM": Qwen2Fields,
    "Qwen3ForCausalLM": Qwen3Fields,
}


class GenerationFields(BaseModel):
    """The keys of ``generation_config.json`` that have a meaning here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    eos_token_id: TokenIds = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)


def load_hf_config(folder: Path, dtype: str = "auto") -> ModelConfig:
    """Describe the model in ``folder``.

    Args:
        folder: holds ``config.json``.
        dtype: ``auto`` takes the one the weights were saved in, or float32 if the config does not say.

    Raises:
        ModelLoadError: a file cannot be read, a field is missing or wrong, or the model is of an unsupported kind.
    """
    path = folder / CONFIG_FILE
    raw = read_json_object(path)
    architecture = _architecture(raw, path)
    fields = _validate(ARCHITECTURES[architecture], raw, path)
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unknown")
        raise ModelLoadError(f"{path}: the model is quantised ({method}); only unquantised ones and GGUF are supported")
    rope, max_model_len = read_rope(
        _rope_settings(fields.rope_parameters, fields.rope_scaling),
        fields.rope_theta or DEFAULT_ROPE_THETA,
        fields.max_position_embeddings,
        path,
    )
    generation = _read_generation_config(folder / GENERATION_CONFIG_FILE)
    defaults = generation.model_dump(include={"temperature", "top_k", "top_p", "min_p"}, exclude_none=True)
    return ModelConfig(
        architecture=architecture,
        name=folder.resolve().name,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=_num_kv_heads(fields, path),
        head_size=_head_size(fields, path),
        max_model_len=max_model_len,
        dtype=_dtype(fields, dtype, path),
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=fields.tie_word_embeddings,
        sliding_windows=_sliding_windows(fields, max_model_len, path),
        bos_token_id=next(iter(_token_ids(fields.bos_token_id)), None),
        eos_token_ids=_token_ids(generation.eos_token_id) or _token_ids(fields.eos_token_id),
        pooling=read_pooling(folder),
        generation_defaults=defaults,
        **fields.projections(),
    )


def _architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if name in ARCHITECTURES:
            return str(name)
    found = f"architecture {names!r}" if names else f"model of type {raw.get('model_type')!r} without architectures"
    raise ModelLoadError(f"{path}: {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


Fields = TypeVar("Fields", bound=BaseModel)


def _validate(model: type[Fields], raw: dict[str, Any], path: Path) -> Fields:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] == "missing" else f", not {first['input']!r}"
        raise ModelLoadError(f"{path}: {field}: {first['msg']}{got}") from None


def _read_generation_config(path: Path) -> GenerationFields:
    return _validate(GenerationFields, read_json_object(path) if path.is_file() else {}, path)


def _rope_settings(parameters: dict[str, Any] | None, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The settings in force if a file holds ``rope_parameters``, ``rope_scaling`` or both.

    Libraries write one of the two. Where there are both, somebody has added ``rope_scaling`` by hand, as model cards
    ask for long texts; it goes before, as in transformers, but changes no base frequency that it does not name.
    """
    if not scaling:
        return parameters
    theta = (parameters or {}).get("rope_theta")
    return scaling if theta is None else {"rope_theta": theta, **scaling}


def _num_kv_heads(fields: LlamaFields, path: Path) -> int:
    num_kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise ModelLoadError(
            f"{path}: num_attention_heads ({fields.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_size(fields: LlamaFields, path: Path) -> int:
    if fields.head_dim is None and fields.hidden_size % fields.num_attention_heads:
        raise ModelLoadError(
            f"{path}: hidden_size ({fields.hidden_size}) must be a multiple of num_attention_heads "
            f"({fields.num_attention_heads}), or head_dim must be given"
        )
    head_size = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    if head_size % 2 or head_size < 4:
        raise ModelLoadError(f"{path}: the head size must be even and at least 4, not {head_size}")
    return head_size


def _sliding_windows(fields: LlamaFields, max_model_len: int, path: Path) -> tuple[int | None, ...]:
    windows = fields.sliding_windows()
    if len(windows) != fields.num_hidden_layers:
        raise ModelLoadError(
            f"{path}: layer_types must have num_hidden_layers ({fields.num_hidden_layers}) entries, not {len(windows)}"
        )
    # A window that no sequence outgrows is full attention, and then needs no KV cache group of its own.
    return tuple(None if window is None or window >= max_model_len else window for window in windows)


def _dtype(fields: LlamaFields, wanted: str, path: Path) -> str:
    if wanted != "auto":
        return wanted
    saved = (fields.dtype or fields.torch_dtype or "float32").removeprefix("torch.")
    if saved not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"{path}: dtype {saved!r} is not supported; choose one with --dtype")
    return saved


def _token_ids(value: TokenIds) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
