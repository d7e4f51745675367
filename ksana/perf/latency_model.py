"""The time of a step as a formula of what is in it: for simulators, and the file ``latency_model.json``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from ksana.perf.json_files import JsonPart, read_json, write_json
from ksana.perf.result import Environment

PLAIN_FEATURES = ("constant", "requests", "cached_tokens", "attended_keys")


class HeldOutError(JsonPart):
    """How well batches were predicted that a fit had not seen. Errors are shares of the measured time."""

    folds: int
    mean_error: float
    median_error: float
    max_error: float
    r2: float = Field(description="share of the variance between batches that the prediction explains")


class FitQuality(JsonPart):
    """How good the formula is."""

    num_batches: int
    r2: float = Field(description="over the batches that it was fitted to")
    held_out: HeldOutError


class FittedRange(JsonPart):
    """The largest steps among the batches: beyond them the formula extrapolates."""

    max_tokens: int
    max_requests: int
    max_cached_tokens: int = Field(description="of one request")


class LatencyModel(JsonPart):
    """A sum of non-negative coefficients times what is in a step.

    The features are: ``constant`` (1); ``requests``; ``cached_tokens``, over all requests; ``attended_keys``, the sum
    over all computed tokens of the keys that each looks at, itself included, in full attention; and ``tokens_from_K``,
    the computed tokens of the step between K and the next knot, so that the cost of a token may differ between small
    and large steps.

    Example::

        model = LatencyModel.load("latency_model.json")
        model.predict([1] * 8, [512] * 8)    # seconds of a step in which eight requests decode
    """

    format: Literal["ksana-latency-model"] = "ksana-latency-model"
    version: Literal[1] = 1
    token_knots: list[int] = Field(min_length=1, description="where the cost of a token changes; the first is 0")
    seconds: dict[str, float] = Field(description="coefficients, in seconds per unit of their feature")
    fitted_range: FittedRange
    quality: FitQuality
    environment: Environment

    @model_validator(mode="after")
    def _check_features(self) -> LatencyModel:
        if self.token_knots[0] != 0 or self.token_knots != sorted(set(self.token_knots)):
            raise ValueError("token_knots must begin with 0 and rise")
        expected = feature_names(self.token_knots)
        if set(self.seconds) != set(expected):
            raise ValueError(f"seconds must have exactly the features {', '.join(expected)}")
        if min(self.seconds.values()) < 0.0:
            raise ValueError("seconds must not be negative")
        return self

    def predict(self, forwarding_tokens: Sequence[int], cached_tokens: Sequence[int]) -> float:
        """Seconds that a step takes.

        Args:
            forwarding_tokens: tokens that the step computes, for each request.
            cached_tokens: tokens in the KV cache before the step, for each request.

        Raises:
            ValueError: the two have different lengths.
        """
        values = features(forwarding_tokens, cached_tokens, self.token_knots)
        coefficients = [self.seconds[name] for name in feature_names(self.token_knots)]
        return float(values @ np.array(coefficients))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyModel:
        """Read a model. Raises UsageError if the file is not one."""
        return read_json(Path(path), cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, as a whole or not at all. Raises UsageError if that is not possible."""
        write_json(Path(path), self)


def feature_names(token_knots: Sequence[int]) -> list[str]:
    """Names of what :func:`features` returns, in its order."""
    return [*PLAIN_FEATURES, *(f"tokens_from_{knot}" for knot in token_knots)]


def features(forwarding_tokens: Sequence[int], cached_tokens: Sequence[int], token_knots: Sequence[int]) -> np.ndarray:
    """What the time of a step may depend on: float64 [features].

    Raises:
        ValueError: the requests have different numbers of forwarding and cached tokens.
    """
    forwarding, cached = np.array(forwarding_tokens, dtype=np.float64), np.array(cached_tokens, dtype=np.float64)
    if forwarding.shape != cached.shape:
        raise ValueError(f"{forwarding.size} numbers of forwarding tokens, but {cached.size} of cached ones")
    attended = float((forwarding * cached + forwarding * (forwarding + 1) / 2).sum())
    tokens = float(forwarding.sum())
    ends = [*token_knots[1:], np.inf]
    segments = [max(0.0, min(tokens, end) - start) for start, end in zip(token_knots, ends, strict=True)]
    return np.array([1.0, forwarding.size, cached.sum(), attended, *segments])
