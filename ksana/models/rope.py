"""Frequencies of the rotary position embedding, plain and scaled."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ksana.errors import ModelLoadError
from ksana.types.model import RopeConfig

_DEFAULT_BETA_FAST = 32.0
_DEFAULT_BETA_SLOW = 1.0

_FIRST_POSITIONS = 4096
"""Positions for which tables are made at the start."""


def compute_inv_freq(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor on cos and sin for a rope configuration.

    Args:
        rope: kind and parameters.
        head_size: elements of a head, all of them rotated.
        max_model_len: the longest sequence that will be served, in tokens.

    Returns:
        float32 tensor [head_size / 2] of angles per position, and the attention scaling (1.0 except for yarn).

    Raises:
        ModelLoadError: the kind is unknown or lacks a parameter.

    ``dynamic`` scaling is defined by the length of the sequence at hand: its base grows once a sequence is longer than
    the original context. Keys in the cache were rotated when they were computed and are shared between requests of
    many lengths, so one base must serve all: the one that belongs to ``max_model_len``. While that is within the
    original context, as every configuration file has it, the frequencies are the unscaled ones, and equal to those
    that a model recomputing them would use at any length it is made for; beyond it, short sequences pay for long ones.
    """
    function = _KINDS.get(rope.kind)
    if function is None:
        raise ModelLoadError(f"rope scaling of type {rope.kind!r} is not supported; supported: {', '.join(_KINDS)}")
    try:
        return function(rope, head_size, max_model_len)
    except KeyError as error:
        raise ModelLoadError(f"rope scaling of type {rope.kind!r} needs the parameter {error.args[0]!r}") from error


def _inverse_frequencies(theta: float, head_size: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)


def _default(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return _inverse_frequencies(rope.theta, head_size), 1.0


def _linear(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return _inverse_frequencies(rope.theta, head_size) / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor = rope.parameters["factor"]
    original = rope.parameters["original_max_position_embeddings"]
    stretch = factor * max(max_model_len, original) / original - (factor - 1)
    theta = rope.theta * stretch ** (head_size / (head_size - 2))
    return _inverse_frequencies(theta, head_size), 1.0


def _llama3(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Slow rotations are slowed by ``factor``, fast ones kept, those between blended."""
    inv_freq = _inverse_frequencies(rope.theta, head_size)
    factor = rope.parameters["factor"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    rotations = rope.parameters["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Slow rotations are interpolated, fast ones extrapolated, with a linear ramp over the elements between."""
    parameters = rope.parameters
    factor = parameters["factor"]
    original = parameters["original_max_position_embeddings"]
    low = _element_with_rotations(parameters.get("beta_fast", _DEFAULT_BETA_FAST), rope.theta, head_size, original)
    high = _element_with_rotations(parameters.get("beta_slow", _DEFAULT_BETA_SLOW), rope.theta, head_size, original)
    if parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # the ramp divides by their distance
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    inv_freq = _inverse_frequencies(rope.theta, head_size)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_attention_scaling(parameters)


def _element_with_rotations(rotations: float, theta: float, head_size: int, original: float) -> float:
    """Index of the frequency that turns ``rotations`` times within the original context."""
    return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_scaling(parameters: dict[str, float]) -> float:
    if "attention_factor" in parameters:
        return parameters["attention_factor"]
    factor = parameters["factor"]
    mscale, mscale_all_dim = parameters.get("mscale", 0.0), parameters.get("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_KINDS: dict[str, Callable[[RopeConfig, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryTables:
    """cos and sin of all positions that were ever asked for, since every step asks for a few of the same.

    Args:
        inv_freq, scale: from :func:`compute_inv_freq`.
        dtype: of the tables.
    """

    def __init__(self, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
        self._inv_freq = inv_freq
        self._scale = scale
        self._dtype = dtype
        self._tables = self._compute(_FIRST_POSITIONS)  # cos and sin: [2, positions, 1, head_size]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of int64 positions [T], each [T, 1, head_size], as StepContext describes them."""
        longest = int(positions.numpy(force=True).max()) + 1  # numpy finds it in a fraction of torch's time
        if longest > self._tables.shape[1]:
            self._tables = self._compute(2 * longest)
        if self._tables.device != positions.device:
            self._tables = self._tables.to(positions.device)
        cos, sin = self._tables.index_select(1, positions)
        return cos, sin

    def _compute(self, count: int) -> torch.Tensor:
        angles = torch.arange(count, device=self._inv_freq.device)[:, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        halves = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))
        return halves[:, :, None].to(self._dtype)
