"""Native projections against products in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.kernels.weights import Linear

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SCALES = st.sampled_from([1e-3, 1.0, 1e3])


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(backend: NativeCPUBackend, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Both results are within what rounding each of the sums' terms may cost."""
    packed = backend.pack_linear(weight.clone(), None if bias is None else bias.clone())
    expected = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected += bias.double()
        terms += bias.double().abs()
    # Products of numbers below the normal ones of float32 may be taken for 0.
    error = (x.shape[1] + 2) * (2.0**-24 * terms + 2.0**-126)
    logits = backend.logits(x, packed)
    assert logits.dtype is torch.float32
    assert ((logits.double() - expected).abs() <= error).all()
    for found, of_logits in zip(backend.likeliest(x, packed), backend.argmax(logits), strict=True):
        assert found.tolist() == of_logits.tolist()
    rounded = backend.linear(x, packed)
    assert rounded.dtype is x.dtype
    assert ((rounded.double() - expected).abs() <= error + torch.finfo(x.dtype).eps * expected.abs()).all()


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 100),
    inner=st.integers(1, 80),
    biased=st.booleans(),
    dtype=DTYPES,
    scale=SCALES,
    seed=st.integers(0, 2**16),
)
@example(rows=1, columns=1, inner=1, biased=False, dtype=torch.bfloat16, scale=1.0, seed=0)
@example(rows=193, columns=33, inner=17, biased=True, dtype=torch.bfloat16, scale=1.0, seed=0)  # two blocks of rows
@example(rows=400, columns=70, inner=9, biased=True, dtype=torch.float32, scale=1.0, seed=0)  # three
@example(rows=13, columns=32, inner=2048, biased=False, dtype=torch.bfloat16, scale=1.0, seed=0)
def test_any_shape(
    native: NativeCPUBackend,
    rows: int,
    columns: int,
    inner: int,
    biased: bool,
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    """Incomplete panels and tiles, odd inner dimensions, and ones shorter than a pair."""
    x = (scale * random(seed, rows, inner, dtype=torch.float32)).to(dtype)
    bias = random(seed + 2, columns, dtype=dtype) if biased else None
    check(native, x, random(seed + 1, columns, inner, dtype=dtype), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_rows_and_weights(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    """The kernels take whole rows one after the other; views must arrive as such."""
    wide = random(0, 22, 100, dtype=dtype)
    weight = random(1, 80, 36, dtype=dtype)
    check(native, wide[:, :40], weight.T[:, :].reshape(36, 80)[:, :40], None)
    check(native, wide[::2, 1:38], weight.T[::3, 3:40], random(2, 24, dtype=dtype)[::2])
    check(native, wide.T, random(3, 9, 22, dtype=dtype), None)


@pytest.mark.parametrize("value", [1e-40, 1e-38, 2.0**-126, 3e38])
def test_smallest_and_largest_numbers(native: NativeCPUBackend, value: float) -> None:
    """Numbers below the normal ones may be taken for 0, and not for anything else."""
    for dtype in (torch.float32, torch.bfloat16):
        check(native, torch.full((3, 5), value).to(dtype), torch.eye(5).to(dtype), None)
        check(native, torch.eye(5).to(dtype), torch.full((40, 5), value).to(dtype), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_row_breaks_no_other(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    weight = random(0, 50, 33, dtype=dtype)
    packed = native.pack_linear(weight.clone())
    x = random(1, 15, 33, dtype=dtype)
    good = native.logits(x, packed)
    x[4] = torch.nan
    x[9] = torch.inf
    broken = native.logits(x, packed)
    rows = [row for row in range(15) if row not in (4, 9)]
    assert torch.equal(broken[rows], good[rows])
    assert broken[4].isnan().all()
    assert not broken[9].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_weight_breaks_its_own_column(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    """In the last panel too, where it has nothing but padding beside it."""
    weight = random(0, 33, 6, dtype=dtype)
    weight[32, 5] = torch.nan
    logits = native.logits(random(1, 14, 6, dtype=dtype), native.pack_linear(weight))
    assert logits[:, 32].isnan().all()
    assert logits[:, :32].isfinite().all()


def test_no_rows_are_no_work(native: NativeCPUBackend) -> None:
    packed = native.pack_linear(random(0, 20, 8, dtype=torch.bfloat16))
    assert native.linear(torch.empty(0, 8, dtype=torch.bfloat16), packed).shape == (0, 20)


@given(rows=st.integers(1, 100), columns=st.integers(1, 40), dtype=DTYPES, data=st.data())
def test_embedding_rows_come_back_from_the_packed_weight(
    native: NativeCPUBackend, rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Bit for bit: a tied head has no other copy of them."""
    weight = random(rows, rows, columns, dtype=dtype)
    packed = native.pack_linear(weight.clone())
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=70)), dtype=torch.int64)
    assert torch.equal(native.embed(ids, packed), weight[ids])


def test_embedding_takes_strided_ids(native: NativeCPUBackend) -> None:
    weight = random(0, 50, 6, dtype=torch.bfloat16)
    ids = torch.arange(40)[::3]
    assert torch.equal(native.embed(ids, native.pack_linear(weight.clone())), weight[ids])


def test_what_is_not_packed_is_left_to_torch(native: NativeCPUBackend) -> None:
    weight, x = random(0, 5, 7, dtype=torch.float16), random(1, 3, 7, dtype=torch.float16)
    linear = native.pack_linear(weight)
    assert isinstance(linear, Linear)
    assert linear.packed is None
    torch.testing.assert_close(native.linear(x, linear).double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2)
