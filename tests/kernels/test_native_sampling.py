"""Native sampling operators against float64."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given

from ksana.kernels.base import KernelBackend
from ksana.kernels.cpu.native_backend import NativeCPUBackend

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 2500]))
SPREADS = st.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e4])
"""Standard deviations of logits: from all alike to one far above the rest."""


def logits_of(seed: int, rows: int, size: int, spread: float = 3.0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy((spread * generator.standard_normal((rows, size))).astype(np.float32))


def ones(rows: int) -> np.ndarray:
    return np.ones(rows, dtype=np.float32)


# -- argmax ----------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 5), size=SIZES, levels=st.sampled_from([1, 2, 5, 10**6]), seed=st.integers(0, 2**16))
def test_argmax_is_the_first_of_equals(native: NativeCPUBackend, rows: int, size: int, levels: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-levels, levels, (rows, size)).astype(np.float32)
    tokens, finite = native.argmax(torch.from_numpy(logits))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert finite.all()


@given(size=SIZES, value=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_argmax_sees_what_is_not_finite_anywhere(
    native: NativeCPUBackend, size: int, value: float, data: st.DataObject
) -> None:
    logits = logits_of(size, 3, size)
    logits[1, data.draw(st.integers(0, size - 1))] = value
    tokens, finite = native.argmax(logits)
    assert finite.tolist() == [True, False, True]
    assert all(0 <= token < size for token in tokens)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=1).tolist()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("value", [-np.inf, -3e38, 3e38, 1e-45, -0.0])
def test_argmax_of_rows_of_one_value(native: NativeCPUBackend, size: int, value: float) -> None:
    tokens, finite = native.argmax(torch.full((2, size), value))
    assert tokens.tolist() == [0, 0]
    assert finite.tolist() == [np.isfinite(value)] * 2


def test_argmax_of_the_largest_numbers_is_finite(native: NativeCPUBackend) -> None:
    """Their sum is not, and must not be what decides."""
    logits = torch.full((1, 64), 3e38)
    logits[0, 40] = 3.2e38
    tokens, finite = native.argmax(logits)
    assert (tokens.tolist(), finite.tolist()) == ([40], [True])


@given(
    rows=st.sampled_from([1, 5, 40, 130]),  # columns, or rows, divided among threads
    size=st.integers(1, 130),
    levels=st.sampled_from([1, 2, 5]),
    offset=st.sampled_from([-100.0, 0.0]),  # less than what panels are filled up with
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_likeliest_is_the_argmax_of_the_logits(
    native: NativeCPUBackend, rows: int, size: int, levels: int, offset: float, dtype: torch.dtype, seed: int
) -> None:
    """Small integers: many are equal, in one panel or several."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randint(-levels, levels + 1, (n, 8), generator=generator).to(dtype) for n in (size, rows))
    head = native.pack_linear(weight, torch.full((size,), offset, dtype=dtype))
    logits = x.float() @ weight.float().T + offset
    tokens, finite = native.likeliest(x, head)
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()
    assert finite.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 31, 32, 69])
@pytest.mark.parametrize("rows", [1, 3, 130])
def test_likeliest_sees_what_is_not_finite_anywhere(
    native: NativeCPUBackend, rows: int, column: int, value: float
) -> None:
    weight, x = logits_of(0, 70, 8), logits_of(1, rows, 8)
    weight[column, 3] = value
    x[-1, 3] = 1.0
    tokens, finite = native.likeliest(x, native.pack_linear(weight))
    logits = native.logits(x, native.pack_linear(weight))
    expected, all_finite = native.argmax(logits)
    assert not finite[-1]
    assert finite.tolist() == all_finite.tolist() == logits.isfinite().all(dim=1).tolist()
    assert tokens[finite].tolist() == expected[finite].tolist()
    assert ((tokens >= 0) & (tokens < 70)).all()


def test_likeliest_of_a_soft_cap(native: NativeCPUBackend) -> None:
    """A cap makes equals of the largest, of which the first is taken then, whoever asks."""
    weight = torch.tensor([[1.0, 0.0], [1000.0, 0.0], [2000.0, 0.0]])
    head = native.pack_linear(weight)
    assert native.likeliest(torch.ones(1, 2), head)[0] == 2
    assert (
        native.likeliest(torch.ones(1, 2), head, 5.0)[0] == native.argmax(native.logits(torch.ones(1, 2), head, 5.0))[0]
    )


# -- top k -----------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 4),
    size=SIZES,
    levels=st.sampled_from([1, 3, 50, 10**6]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_top_k_is_the_head_of_a_stable_sort(
    native: NativeCPUBackend, rows: int, size: int, levels: int, seed: int, data: st.DataObject
) -> None:
    """Equal logits in the order of their tokens, at the end of the list too; from one token to the whole row."""
    logits = np.random.default_rng(seed).integers(-levels, levels, (rows, size)).astype(np.float32)
    k = data.draw(st.one_of(st.just(1), st.just(size), st.integers(1, size)))
    values, tokens = native.top_k(torch.from_numpy(logits), k)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert tokens.tolist() == expected.tolist()
    assert np.array_equal(values, np.take_along_axis(logits, expected, axis=1))


@pytest.mark.parametrize("k", [1, 20, 100])
@pytest.mark.parametrize("rising", [False, True])
def test_top_k_of_sorted_rows(native: NativeCPUBackend, k: int, rising: bool) -> None:
    """Every element displaces one, or none does."""
    logits = torch.arange(300.0)[None] * (1 if rising else -1)
    values, tokens = native.top_k(logits, k)
    assert tokens[0].tolist() == (list(range(299, 299 - k, -1)) if rising else list(range(k)))
    assert values[0].tolist() == logits[0, tokens[0]].tolist()


# -- the distribution ------------------------------------------------------------------------------------------------


def weights_of(logits: torch.Tensor, temperature: float) -> np.ndarray:
    """exp((logit - largest) / temperature) in float64, for temperatures as float32."""
    row = logits.numpy().astype(np.float64)
    return np.exp((row - row.max(axis=-1, keepdims=True)) / np.float64(np.float32(temperature)))


@given(
    size=SIZES,
    spread=SPREADS,
    temperatures=st.lists(st.floats(2.0**-26, 100, width=32), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_exp_sums(native: NativeCPUBackend, size: int, spread: float, temperatures: list[float], seed: int) -> None:
    logits = logits_of(seed, len(temperatures), size, spread)
    actual = native.exp_sums(logits, np.array(temperatures, dtype=np.float32))
    expected = [weights_of(row, t).sum() for row, t in zip(logits, temperatures, strict=True)]
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def check_draw(logits: torch.Tensor, temperature: float, min_p: float, uniform: float, token: int) -> None:
    """The token is where the distribution function passes the number, to what float32 can tell."""
    weights, error = weights_of(logits, temperature), 1e-5
    assert weights[token] >= np.float32(min_p) * (1 - 1e-4), "min-p leaves it out"
    # Weights at the very border of min-p may count or not.
    surely = np.where((weights < np.float32(min_p) * (1 + 1e-4)) & (weights < 1), 0, weights)
    maybe = np.where(weights < np.float32(min_p) * (1 - 1e-4), 0, weights)
    assert (surely[:token].sum() - error * maybe.sum()) / maybe.sum() <= uniform
    assert (maybe[: token + 1].sum() + error * maybe.sum()) / surely.sum() >= uniform


UNIFORMS = st.one_of(st.sampled_from([0.0, 1 - 2.0**-53, 0.5]), st.floats(0, 1, exclude_max=True))


@given(
    size=SIZES,
    spread=SPREADS,
    temperature=st.sampled_from([1e-8, 0.01, 0.7, 1.0, 100.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.999, 1.0]),
    uniform=UNIFORMS,
    seed=st.integers(0, 2**16),
)
@example(size=2500, spread=0.0, temperature=1.0, min_p=0.0, uniform=1 - 2.0**-53, seed=0)
@example(size=70, spread=1e4, temperature=1.0, min_p=0.0, uniform=1 - 2.0**-53, seed=0)
def test_draw_inverts_the_distribution_function(
    native: NativeCPUBackend, size: int, spread: float, temperature: float, min_p: float, uniform: float, seed: int
) -> None:
    logits = logits_of(seed, 1, size, spread)
    parameters = (np.array([value], dtype=np.float32) for value in (temperature, min_p))
    [token] = native.draw(logits, *parameters, np.array([uniform]))
    check_draw(logits[0], temperature, min_p, uniform, int(token))


@given(size=SIZES, seed=st.integers(0, 2**16), uniform=UNIFORMS)
def test_draw_agrees_with_the_default_of_the_interface(
    native: NativeCPUBackend, size: int, seed: int, uniform: float
) -> None:
    """But where the number all but hits a step of the distribution function."""
    logits = logits_of(seed, 1, size)
    weights = weights_of(logits, 1.0)
    steps = weights.cumsum() / weights.sum()
    assume(np.abs(steps[:-1] - uniform).min(initial=1.0) > 1e-5)
    arguments = (logits, ones(1), np.zeros(1, dtype=np.float32), np.array([uniform]))
    assert native.draw(*arguments) == KernelBackend().draw(*arguments)


def test_draws_of_evenly_spread_numbers_have_the_probabilities(native: NativeCPUBackend) -> None:
    count = 20000
    logits = logits_of(0, 1, 40, 2.0)
    uniforms = (np.arange(count) + 0.5) / count
    tokens = native.draw(logits.expand(count, 40), ones(count), np.full(count, 0.05, dtype=np.float32), uniforms)
    weights = weights_of(logits[0], 1.0)
    weights[weights < 0.05] = 0.0
    counts = np.bincount(tokens, minlength=40)
    assert np.abs(counts - count * weights / weights.sum()).max() <= 1.5
    assert (np.diff(tokens) >= 0).all()


def test_extreme_numbers_draw_the_first_and_the_last_token_that_have_weight(native: NativeCPUBackend) -> None:
    logits = torch.full((2, 1500), -1e4)
    logits[:, [7, 300, 1200]] = 0.0
    tokens = native.draw(logits, ones(2), np.zeros(2, dtype=np.float32), np.array([0.0, 1 - 2.0**-53]))
    assert tokens.tolist() == [7, 1200]


def test_operators_take_strided_rows(native: NativeCPUBackend) -> None:
    logits = logits_of(0, 6, 200)[::2, 3:150]
    assert native.argmax(logits)[0].tolist() == logits.argmax(dim=1).tolist()
    assert native.top_k(logits, 4)[1].tolist() == logits.topk(4, dim=1)[1].tolist()
    expected = [weights_of(row, 1.0).sum() for row in logits]
    np.testing.assert_allclose(native.exp_sums(logits, ones(6)[::2]), expected, rtol=2e-5)
    tokens = native.draw(logits, ones(6)[::2], np.zeros(6, dtype=np.float32)[::2], np.linspace(0, 0.9, 6)[::2])
    for row, uniform, token in zip(logits, np.linspace(0, 0.9, 6)[::2], tokens, strict=True):
        check_draw(row, 1.0, 0.0, uniform, int(token))
