"""Random numbers that depend on a request's seed and the token's position, and on nothing else.

No generator has a state to carry, so a seeded request draws the same numbers in any batch, after a preemption, in any
order. The mixing function is SplitMix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 numbers in [0, 1), one for each pair.

    Args:
        seeds: uint64 [n].
        positions: int64 [n], index of the token that is drawn.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
