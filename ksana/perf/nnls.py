"""Least squares with coefficients that may not be negative."""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-10


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Minimise ``|matrix @ x - target|`` over ``x >= 0``, by the active set method of Lawson and Hanson (1974).

    Args:
        matrix: float64 [rows, columns]; columns may depend on each other, or be zero.
        target: float64 [rows].

    Returns:
        float64 [columns].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale  # columns of equal length, so that one tolerance fits all
    tolerance = _TOLERANCE * max(1.0, float(np.linalg.norm(target)))
    x = np.zeros(matrix.shape[1])
    passive = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * matrix.shape[1]):  # rounding could make it circle; otherwise it ends long before
        gain = np.where(passive, -np.inf, scaled.T @ (target - scaled @ x))
        if gain.size == 0 or gain.max() <= tolerance:
            break
        entering = int(gain.argmax())
        passive[entering] = True
        x = _solve_within(scaled, target, x, passive)
        if x[entering] == 0.0:
            break  # it gains less than rounding takes
    solution: np.ndarray = x / scale
    return solution


def _solve_within(matrix: np.ndarray, target: np.ndarray, x: np.ndarray, passive: np.ndarray) -> np.ndarray:
    """Move from ``x`` towards the best fit over the passive columns, giving up those that reach zero on the way."""
    while passive.any():
        best = np.zeros_like(x)
        best[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        blocked = passive & (best <= 0.0)
        if not blocked.any():
            return best
        distance = x - best
        share = np.min(x[blocked] / np.where(distance[blocked] > 0.0, distance[blocked], 1.0))
        x = np.maximum(x - share * distance, 0.0)
        leaving = blocked & (x <= _TOLERANCE)
        x[leaving] = 0.0
        passive &= ~leaving
    return np.zeros_like(x)
