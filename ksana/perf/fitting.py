"""From measured batches to a latency model, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ksana.errors import UsageError
from ksana.perf.latency_model import FitQuality, FittedRange, HeldOutError, LatencyModel, feature_names, features
from ksana.perf.nnls import nnls
from ksana.perf.result import BatchResult, PerfResult

LEAST_BATCHES = 8
"""Fewer say nothing about batches that are not among them."""

_KNOTS = (8, 32, 128, 512)
"""Tokens of a step at which the cost of one more may change: products of matrices go from memory to arithmetic."""

_LEAST_PER_SEGMENT = 3
"""Batches that a segment between knots must have, or it is joined with the one before."""

_SEED = 20240607


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, and what it made of the batches.

    Attributes:
        measured: seconds of each batch, float64 [batches].
        held_out: what a fit to the other folds predicts for it, float64 [batches].
    """

    model: LatencyModel
    batches: list[BatchResult]
    measured: np.ndarray
    held_out: np.ndarray


def fit_latency_model(result: PerfResult, folds: int = 5) -> Fit:
    """Fit the median step of each batch; what is minimised is the relative error, so that short steps count too.

    The held-out error comes from ``folds`` further fits, each to all batches but a part. The parts are drawn with a
    fixed seed.

    Raises:
        UsageError: there are too few batches, or one whose time is no positive number.
    """
    batches = result.batches
    if len(batches) < LEAST_BATCHES:
        raise UsageError(
            f"the result has {len(batches)} batches, and a fit needs at least {LEAST_BATCHES} that differ in tokens, "
            "requests and cached tokens; ksana-perf grid writes such"
        )
    if not 2 <= folds <= len(batches):
        raise UsageError(f"--folds {folds} is not valid: must be from 2 to the number of batches, {len(batches)}")
    measured = np.array([batch.step_ms.p50 / 1e3 for batch in batches])
    if measured.min() <= 0.0:
        raise UsageError(f"batch {batches[int(measured.argmin())].name} took no time; the result is damaged")
    knots = _choose_knots([batch.num_forwarding_tokens for batch in batches])
    matrix = np.stack([features(*_shape(batch), knots) for batch in batches])
    coefficients = _fit(matrix, measured)
    held_out = _predict_held_out(matrix, measured, folds)
    model = LatencyModel(
        token_knots=knots,
        seconds=dict(zip(feature_names(knots), coefficients.tolist(), strict=True)),
        fitted_range=_range_of(batches),
        quality=FitQuality(
            num_batches=len(batches),
            r2=_r2(measured, matrix @ coefficients),
            held_out=_held_out_error(measured, held_out, folds),
        ),
        environment=result.environment,
    )
    return Fit(model, batches, measured, held_out)


def _fit(matrix: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return nnls(matrix / measured[:, None], np.ones_like(measured))


def _predict_held_out(matrix: np.ndarray, measured: np.ndarray, folds: int) -> np.ndarray:
    order = np.random.default_rng(_SEED).permutation(len(measured))
    predicted = np.empty_like(measured)
    for part in np.array_split(order, folds):
        rest = np.setdiff1d(order, part)
        predicted[part] = matrix[part] @ _fit(matrix[rest], measured[rest])
    return predicted


def _held_out_error(measured: np.ndarray, predicted: np.ndarray, folds: int) -> HeldOutError:
    errors = np.abs(predicted - measured) / measured
    return HeldOutError(
        folds=folds,
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        max_error=float(errors.max()),
        r2=_r2(measured, predicted),
    )


def _r2(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Coefficient of determination; 0 if all batches took the same time, since then there is nothing to explain."""
    variation = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((measured - predicted) ** 2).sum()) / variation if variation > 0.0 else 0.0


def _choose_knots(tokens: Sequence[int]) -> list[int]:
    """Knots with enough batches on both sides, so that no segment's cost is a guess."""
    knots = [0]
    for knot in _KNOTS:
        within = sum(knots[-1] < count <= knot for count in tokens)
        beyond = sum(count > knot for count in tokens)
        if within >= _LEAST_PER_SEGMENT and beyond >= _LEAST_PER_SEGMENT:
            knots.append(knot)
    return knots


def _shape(batch: BatchResult) -> tuple[list[int], list[int]]:
    """Forwarding and cached tokens, request by request."""
    forwarding, cached = [], []
    for group in batch.requests:
        forwarding += [group.forwarding_token_num] * group.request_num
        cached += [group.kv_cached_token_num] * group.request_num
    return forwarding, cached


def _range_of(batches: list[BatchResult]) -> FittedRange:
    return FittedRange(
        max_tokens=max(batch.num_forwarding_tokens for batch in batches),
        max_requests=max(batch.num_requests for batch in batches),
        max_cached_tokens=max(group.kv_cached_token_num for batch in batches for group in batch.requests),
    )
