"""The uniform numbers behind sampling."""

from __future__ import annotations

import numpy as np
import pytest

from ksana.worker.random import uniforms


def draw(seeds: object, positions: object) -> np.ndarray:
    pair = np.broadcast_arrays(np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.int64))
    return uniforms(pair[0], pair[1])


def test_numbers_never_change() -> None:
    """A client that sends a seed expects the same answer from the next release."""
    expected = [0.8833108082136426, 0.37239342287916577, 0.15289334222649975, 0.8293342985315447]
    assert draw([0, 1, 42, 2**64 - 1], [0, 1, 7, 100]).tolist() == expected


def test_numbers_are_in_range() -> None:
    values = draw(np.arange(100_000), 5)
    assert values.min() >= 0.0
    assert values.max() < 1.0


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (0, np.arange(100_000)),
        (12345, np.arange(100_000)),
        (np.arange(100_000), 0),
        (np.arange(100_000) << 32, 17),
        (np.arange(100_000), np.arange(100_000)),
        (np.arange(100_000), np.arange(100_000)[::-1]),
    ],
    ids=["positions", "positions of another seed", "seeds", "seeds in the high half", "both", "against each other"],
)
def test_numbers_are_uniform_and_without_order(seeds: object, positions: object) -> None:
    values = draw(seeds, positions)
    assert len(np.unique(values)) == len(values)
    # Kolmogorov-Smirnov at a level of about 1e-4, and neighbours that know nothing of each other.
    ranks = (np.arange(len(values)) + 0.5) / len(values)
    assert np.abs(np.sort(values) - ranks).max() < 2.2 / np.sqrt(len(values))
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / np.sqrt(len(values))


def test_streams_of_neighbouring_seeds_are_not_shifted_copies() -> None:
    """Seed s at position p + 1 must not be seed s + 1 at position p: n samples of one prompt would be one sample."""
    streams = {seed: set(draw(seed, np.arange(2000)).tolist()) for seed in range(20)}
    assert len(set().union(*streams.values())) == 20 * 2000
