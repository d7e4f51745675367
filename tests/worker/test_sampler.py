"""Tokens from logits: the right distribution, row by row, whatever the rows around."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ksana.kernels.base import KernelBackend
from ksana.kernels.cpu.backend import CPUBackend
from ksana.kernels.cpu.library import load_library
from ksana.kernels.cpu.native import NativeKernels
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.types.config import KernelConfig
from ksana.worker import sampler
from ksana.worker.logits_processor import BANNED
from ksana.worker.sampler import SamplingRows

BACKEND: KernelBackend


@pytest.fixture(scope="module", autouse=True, params=["native", "torch"])
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """With one thread there is no way to split a row, so that nothing could depend on the number of rows."""
    global BACKEND
    before = torch.get_num_threads()
    library = load_library()
    assert library is not None
    if request.param == "native":
        BACKEND = NativeCPUBackend(KernelConfig(threads=2), NativeKernels(library))
    else:
        BACKEND = CPUBackend(KernelConfig(threads=2))
    yield
    torch.set_num_threads(before)


def sample(logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    likeliest, finite = BACKEND.argmax(logits)
    assert finite.all()
    return sampler.sample(BACKEND, logits, likeliest, params, np.arange(len(logits)))


def rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniforms: np.ndarray | float = 0.5,
) -> SamplingRows:
    return SamplingRows(
        temperatures=np.full(count, temperature, dtype=np.float32),
        top_ks=np.full(count, top_k, dtype=np.int64),
        top_ps=np.full(count, top_p, dtype=np.float32),
        min_ps=np.full(count, min_p, dtype=np.float32),
        uniforms=np.broadcast_to(np.asarray(uniforms, dtype=np.float64), (count,)).copy(),
    )


def expected_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """What the parameters mean, for one row of distinct logits: top-k, top-p of what is left, min-p of what is left."""
    scaled = logits.astype(np.float64) / np.float32(temperature)
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p)
    kept = p[order]
    if top_k > 0:
        kept[top_k:] = 0
    kept /= kept.sum()
    kept[np.cumsum(kept) - kept >= np.float32(top_p)] = 0
    kept[kept < kept[0] * np.float32(min_p)] = 0
    result: np.ndarray = np.zeros_like(p)
    result[order] = kept / kept.sum()
    return result


def frequencies(logits: torch.Tensor, draws: int, **params: float | int) -> np.ndarray:
    """How often each token is drawn by evenly spaced uniform numbers: no chance in it."""
    uniforms = (np.arange(draws) + 0.5) / draws
    tokens = sample(logits.expand(draws, -1), rows(draws, uniforms=uniforms, **params))  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=logits.shape[-1])


PARAMETERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 7},
    {"top_k": 1_000_000},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 9, "min_p": 0.3, "temperature": 2.0},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.2},
]


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
def test_distribution_is_the_one_that_the_parameters_mean(params: dict[str, float]) -> None:
    logits = 3 * torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    expected = expected_distribution(logits[0].numpy(), **full)  # type: ignore[arg-type]
    counts = frequencies(logits, 20_000, **params)
    assert counts[expected == 0].sum() == 0
    np.testing.assert_allclose(counts, expected * 20_000, atol=2)


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.5},  # the candidates suffice
        {"top_p": 0.95, "temperature": 3.0},  # they do not: a full sort
        {"top_k": 1500, "temperature": 3.0},  # more than there are candidates
        {"top_k": 1500, "top_p": 0.4, "temperature": 3.0},  # top-p counts what top-k has left, not the vocabulary
        {"top_k": 1024, "top_p": 0.9, "temperature": 3.0},
    ],
    ids=str,
)
def test_distribution_over_a_large_vocabulary(params: dict[str, float]) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2))
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    expected = expected_distribution(logits[0].numpy(), **full)  # type: ignore[arg-type]
    counts = frequencies(logits, 1000, **params)
    # One more or less at either end of the kept set, by rounding.
    assert counts[expected == 0].sum() <= 1
    np.testing.assert_allclose(counts, expected * 1000, atol=2)


def test_top_p_counts_what_top_k_has_left_whatever_the_size_of_the_vocabulary() -> None:
    """Two thirds of the mass of the 1500 likeliest of 3000 equal tokens are 1000 of them, not 2000 or 1334."""
    logits = torch.linspace(0.001, 0, 3000)[None]
    params = rows(1, top_k=1500, top_p=2 / 3, uniforms=1 - 1e-12)
    assert abs(int(sample(logits, params)[0]) - 1000) <= 2


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -3.0, -2.0, -1.0]])
    assert sample(logits, rows(3, temperature=0.0)).tolist() == [1, 0, 3]
    # Beside a row that samples, too.
    mixed = rows(3, temperature=0.0)
    mixed.temperatures[2] = 1.0
    assert sample(logits, mixed).tolist()[:2] == [1, 0]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 1e-39, 1e-45])
def test_tiny_temperature_takes_the_likeliest(temperature: float, params: dict[str, float]) -> None:
    """Division by it overflows a float32."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    for uniform in (0.0, 0.5, 1 - 2**-53):
        token = sample(logits, rows(1, temperature=temperature, uniforms=uniform, **params))  # type: ignore[arg-type]
        assert token[0] == logits.argmax()


@pytest.mark.parametrize("top_p", [1e-3, 1e-20, 1e-44, 1e-50])
def test_tiny_top_p_keeps_the_likeliest(top_p: float) -> None:
    """The smallest ones are zero as a float32, and zero would keep nothing."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    for uniform in (0.0, 1 - 2**-53):
        assert sample(logits, rows(1, top_p=top_p, uniforms=uniform))[0] == logits.argmax()


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("uniform", [0.0, 2**-53, 1 - 2**-53])
def test_ends_of_the_uniform_range_draw_tokens_that_can_be(uniform: float, params: dict[str, float]) -> None:
    """Tokens without weight at either end of the vocabulary are never drawn."""
    logits = torch.full((1, 40), -1e4)
    logits[0, 10:13] = torch.tensor([1.0, 2.0, 0.5])
    token = sample(logits, rows(1, uniforms=uniform, **params))[0]  # type: ignore[arg-type]
    assert 10 <= token < 13


def test_min_p_of_one_keeps_the_likeliest_and_its_equals() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0]])
    assert set(np.flatnonzero(frequencies(logits, 100, min_p=1.0))) == {1, 3}


def test_equal_logits_at_the_edge_of_top_k_leave_exactly_k() -> None:
    assert np.count_nonzero(frequencies(torch.zeros(1, 30), 3000, top_k=4)) == 4


ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.sampled_from([0, 1, 3, 20]),
        st.sampled_from([1.0, 0.9, 0.3]),
        st.sampled_from([0.0, 0.1]),
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_token_of_a_row_does_not_depend_on_the_rows_around(
    specs: list[tuple[float, int, float, float, float]], seed: int, rng: object
) -> None:
    # Rounded, so that there are ties.
    logits = torch.randn(len(specs), 40, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    check_independence(logits, specs, rng)


def test_token_of_a_row_does_not_depend_on_the_rows_around_in_a_large_vocabulary() -> None:
    """Where torch would split a lone row over its threads, and rows of more work differently."""
    rng = np.random.default_rng(0)
    choices = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.3, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (2.0, 0, 0.99, 0.01)]
    specs = [(*choices[i % len(choices)], float(rng.random())) for i in range(10)]
    logits = 3 * torch.randn(len(specs), 50_000, generator=torch.Generator().manual_seed(0))
    check_independence(logits, specs, None)


def check_independence(logits: torch.Tensor, specs: list[tuple[float, int, float, float, float]], rng: object) -> None:
    columns = [np.array(column) for column in zip(*specs, strict=True)]
    params = SamplingRows(
        columns[0].astype(np.float32),
        columns[1].astype(np.int64),
        columns[2].astype(np.float32),
        columns[3].astype(np.float32),
        columns[4].astype(np.float64),
    )
    together = sample(logits, params)
    for row in range(len(specs)):
        assert sample(logits[[row]], params.take(np.array([row])))[0] == together[row]
    order = list(range(len(specs)))
    if rng is not None:
        rng.shuffle(order)  # type: ignore[attr-defined]
    else:
        order.reverse()
    assert sample(logits[order], params.take(np.array(order))).tolist() == together[order].tolist()


def test_log_probabilities_are_those_of_the_unchanged_logits() -> None:
    """Of the drawn token, and of as many of the likeliest as each row asks for."""
    logits = 3 * torch.randn(3, 30, generator=torch.Generator().manual_seed(4))
    tokens, counts = np.array([5, 6, 7]), np.array([1, 4, 100])
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, entry in enumerate(sampler.token_logprobs(BACKEND, logits, tokens, counts)):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        order = expected[row].argsort(descending=True)[: counts[row]]
        assert [token for token, _ in entry.top] == order.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(expected[row, order].tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [9, 1500, 5000])
@pytest.mark.parametrize("temperature", [1e-8, 1.0, 100.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.4}, {"top_k": 1200, "top_p": 0.99}, {"min_p": 0.2}])
def test_banned_tokens_are_never_drawn(size: int, temperature: float, filters: dict[str, float]) -> None:
    """Their logits are the lowest there are: no sum of them, and no difference to one, may become infinite."""
    logits = torch.full((6, size), BANNED)
    left = [2, size - 3]
    logits[:, left] = torch.tensor([3.0, 2.9])
    logits[3:, left] = torch.tensor([3e38, -3e38])
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        tokens = sample(logits, rows(6, temperature=temperature, uniforms=uniform, **filters)).tolist()  # type: ignore[arg-type]
        assert set(tokens) <= set(left)
        assert tokens[3:] == [2] * 3


def test_rows_are_drawn_from_where_they_are() -> None:
    """Some rows of the logits, as if the others were not there."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32))
    params = rows(5, uniforms=np.linspace(0.1, 0.9, 5))
    params.temperatures[1], params.top_ks[2] = 0.0, 7
    chosen = np.array([1, 2, 4])
    likeliest, _ = BACKEND.argmax(logits)
    tokens = sampler.sample(BACKEND, logits, likeliest, params.take(chosen), chosen)
    assert tokens.tolist() == sample(logits, params)[chosen].tolist()
