"""When requests leave."""

from __future__ import annotations

import math

import numpy as np

from ksana.bench.options import ArrivalOptions


def send_offsets(count: int, arrival: ArrivalOptions, *, seed: int) -> list[float]:
    """Seconds after the start at which each of ``count`` requests leaves, ascending from 0.

    ``burst`` requests leave together, and bursts are on the average ``burst / rate`` seconds apart: exactly so, or with
    exponential gaps, which make a Poisson process.
    """
    if math.isinf(arrival.rate):
        return [0.0] * count
    num_bursts = math.ceil(count / arrival.burst)
    gap = arrival.burst / arrival.rate
    if arrival.poisson:
        gaps = np.random.default_rng([seed, num_bursts]).exponential(gap, num_bursts)
        starts = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    else:
        starts = np.arange(num_bursts) * gap
    offsets: list[float] = np.repeat(starts, arrival.burst)[:count].tolist()
    return offsets
