"""The rope settings of a ``config.json``, in the old spelling (``rope_scaling``) and the new (``rope_parameters``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ksana.errors import ModelLoadError
from ksana.types.model import RopeConfig

_ORIGINAL_LENGTH = "original_max_position_embeddings"

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def read_rope(
    scaling: dict[str, Any] | None, theta: float, max_position_embeddings: int, path: Path
) -> tuple[RopeConfig, int]:
    """Read the rope and how long sequences may be with it.

    Args:
        scaling: ``rope_parameters`` or ``rope_scaling``; may hold ``rope_theta`` itself.
        theta: ``rope_theta`` of the config proper.
        max_position_embeddings: of the config.
        path: the file, for messages.

    Returns:
        The rope, and the most tokens of prompt and output. ``max_position_embeddings`` mostly is the length after
        scaling, but some configs (Qwen2.5 with yarn) state the length before. Only ``original_max_position_embeddings``
        tells which: where it is given, linear and yarn allow that length times the factor. Where it is not,
        multiplying would promise lengths that the model was never made for. ``dynamic`` scaling takes
        ``max_position_embeddings`` as the original length by definition and stays within it; see
        :func:`ksana.models.rope.compute_inv_freq`.

    Raises:
        ModelLoadError: the kind is unknown, or a parameter is missing or no number.
    """
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    where = f"{path}: rope scaling"
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ModelLoadError(f"{where}: different settings for different layers are not supported")
    if kind not in _REQUIRED:
        raise ModelLoadError(f"{where}: type {kind!r} is not supported; supported: {', '.join(_REQUIRED)}")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(f"{where}: partial_rotary_factor other than 1 is not supported")
    parameters = {name: _number(scaling, name, where) for name in _REQUIRED[kind]}
    for name in _OPTIONAL.get(kind, ()):
        if scaling.get(name) is not None:
            parameters[name] = _number(scaling, name, where)
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise ModelLoadError(f"{where}: low_freq_factor must be below high_freq_factor")
    original = None if scaling.get(_ORIGINAL_LENGTH) is None else _number(scaling, _ORIGINAL_LENGTH, where)
    max_model_len = max_position_embeddings
    if original is not None and kind in ("linear", "yarn"):
        max_model_len = max(max_model_len, int(original * parameters["factor"]))
    if kind == "dynamic":
        parameters[_ORIGINAL_LENGTH] = float(max_position_embeddings)
    elif kind in ("llama3", "yarn"):
        parameters[_ORIGINAL_LENGTH] = original or float(max_position_embeddings)
    if scaling.get("rope_theta") is not None:
        theta = _number(scaling, "rope_theta", where)
    return RopeConfig(theta=theta, kind=kind, parameters=parameters), max_model_len


def _number(scaling: dict[str, Any], name: str, where: str) -> float:
    value = scaling.get(name)
    if value is None:
        raise ModelLoadError(f"{where}: {name} is missing")
    if name == "truncate":
        return float(bool(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelLoadError(f"{where}: {name} must be a number above 0, not {value!r}")
    return float(value)
