"""``config.json`` and ``generation_config.json`` of a Hugging Face model folder, read into :class:`ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ksana.errors import ModelLoadError
from ksana.models import multimodal
from ksana.models.families import ARCHITECTURES
from ksana.models.families.base import DEFAULT_ROPE_THETA, DecoderFields, TokenIds
from ksana.models.hf_pooling import read_pooling
from ksana.models.hf_rope import read_rope
from ksana.models.json_file import read_json_object
from ksana.types.model import ModelConfig, RopeConfig

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


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
    if architecture in multimodal.ARCHITECTURES:
        raw = multimodal.text_settings(raw, path)
    fields = _validate(ARCHITECTURES[architecture], raw, path)
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unknown")
        raise ModelLoadError(f"{path}: the model is quantised ({method}); only unquantised ones and GGUF are supported")
    theta, longest = fields.rope_theta or DEFAULT_ROPE_THETA, fields.max_position_embeddings
    rope, max_model_len = read_rope(fields.rope_settings(), theta, longest, path)
    windows = _sliding_windows(fields, path)
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
        layer_ropes=_layer_ropes(fields, rope, windows, path),
        # A window that no sequence outgrows is full attention, and then needs no KV cache group of its own.
        sliding_windows=tuple(None if window is None or window >= max_model_len else window for window in windows),
        bos_token_id=next(iter(_token_ids(fields.bos_token_id)), None),
        eos_token_ids=_token_ids(generation.eos_token_id) or _token_ids(fields.eos_token_id),
        pooling=read_pooling(folder),
        generation_defaults=defaults,
        **fields.options(),
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


def _num_kv_heads(fields: DecoderFields, path: Path) -> int:
    num_kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise ModelLoadError(
            f"{path}: num_attention_heads ({fields.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_size(fields: DecoderFields, path: Path) -> int:
    if fields.head_dim is None and fields.hidden_size % fields.num_attention_heads:
        raise ModelLoadError(
            f"{path}: hidden_size ({fields.hidden_size}) must be a multiple of num_attention_heads "
            f"({fields.num_attention_heads}), or head_dim must be given"
        )
    head_size = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    if head_size % 2 or head_size < 4:
        raise ModelLoadError(f"{path}: the head size must be even and at least 4, not {head_size}")
    return head_size


def _sliding_windows(fields: DecoderFields, path: Path) -> list[int | None]:
    windows = fields.sliding_windows()
    if len(windows) != fields.num_hidden_layers:
        raise ModelLoadError(
            f"{path}: layer_types must have num_hidden_layers ({fields.num_hidden_layers}) entries, not {len(windows)}"
        )
    return windows


def _layer_ropes(
    fields: DecoderFields, rope: RopeConfig, windows: list[int | None], path: Path
) -> tuple[RopeConfig, ...]:
    settings = fields.local_rope_settings()
    if settings is None:
        return ()
    local, _ = read_rope(settings, DEFAULT_ROPE_THETA, fields.max_position_embeddings, path)
    return tuple(rope if window is None else local for window in windows)


def _dtype(fields: DecoderFields, wanted: str, path: Path) -> str:
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
