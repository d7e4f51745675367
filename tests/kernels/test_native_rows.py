"""Native operators on single rows: norms, and the write to the cache with its conversion to eight bit floats."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ksana.kernels.cpu.native_backend import NativeCPUBackend

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    return x.double() * scale * weight.double()


# -- norms ---------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    precise=st.booleans(),
    scale=st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 1e4, 1e17]),
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 2**16),
)
def test_rms_norm(
    native: NativeCPUBackend,
    rows: int,
    size: int,
    dtype: torch.dtype,
    precise: bool,
    scale: float,
    eps: float,
    seed: int,
) -> None:
    """Whatever the size of row and numbers, zeros and denormal ones included."""
    x = (scale * random(seed, rows, size).double()).to(dtype)
    weight = random(seed + 1, size).to(torch.float32 if precise else dtype)
    actual = native.rms_norm(x, weight, eps)
    assert actual.dtype is dtype
    rtol = 4e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), norm(x, weight, eps), rtol=rtol, atol=2.0**-126)


def test_rms_norm_of_strided_rows(native: NativeCPUBackend) -> None:
    x, weight = random(0, 10, 60)[::2, 3:40], random(1, 37)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5).double(), norm(x, weight, 1e-5), rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("size", [5, 16, 37])
@pytest.mark.parametrize("position", [0, -1])
def test_a_broken_row_stays_broken_and_breaks_no_other(native: NativeCPUBackend, size: int, position: int) -> None:
    x, weight = random(0, 5, size), torch.ones(size)
    x[2, position] = torch.nan
    actual = native.rms_norm(x, weight, 1e-5)
    assert actual[2].isnan().all()
    assert actual[[0, 1, 3, 4]].isfinite().all()


# -- soft caps -------------------------------------------------------------------------------------------------------


def capped(native: NativeCPUBackend, values: torch.Tensor, cap: float) -> torch.Tensor:
    """By way of a product with one."""
    one = native.pack_linear(torch.ones(1, 1))
    return native.logits(values[:, None], one, cap)[:, 0]


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("count", [1, 16, 37, 20_000])
def test_soft_cap(native: NativeCPUBackend, count: int, cap: float) -> None:
    values = 40 * random(0, count)
    expected = cap * torch.tanh(values.double() / cap)
    torch.testing.assert_close(capped(native, values, cap).double(), expected, rtol=0, atol=4e-7 * cap)


def test_soft_cap_of_what_is_no_number(native: NativeCPUBackend) -> None:
    """Infinity is as large as can be; what is broken stays so and is noticed when a token is drawn."""
    values = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, torch.nan] * 5)
    result = capped(native, values, 30.0).view(5, 5)
    assert torch.equal(result[:, :4], torch.tensor([[30.0, -30.0, 30.0, -30.0]] * 5))
    assert result[:, 4].isnan().all()


# -- writing eight bit floats ----------------------------------------------------------------------------------------


def written(native: NativeCPUBackend, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the cache holds of ``values``, in their order."""
    assert len(values) % 2 == 0
    # Blocks of one token of one head of one element: no layout can tear them apart.
    cache = torch.zeros(len(values) // 2, 1, 2, 1, dtype=dtype)
    native.write_kv(cache, torch.arange(len(cache)), values.view(-1, 2, 1))
    return cache.view(-1)


def check_written(native: NativeCPUBackend, values: torch.Tensor, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    expected = values.clamp(-largest, largest).to(dtype)
    actual = written(native, values, dtype)
    number = ~values.isnan()
    assert torch.equal(actual.view(torch.uint8)[number], expected.view(torch.uint8)[number])
    assert actual.float()[~number].isnan().all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_bfloat16_number_becomes_what_torch_makes_of_it(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    """What is too large becomes the largest number. Denormal numbers, both zeros, infinity and NaN are among them."""
    bits = np.arange(2**16, dtype=np.uint16)
    check_written(native, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), dtype)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float32_numbers_around_every_threshold_become_what_torch_makes_of_them(
    native: NativeCPUBackend, dtype: torch.dtype
) -> None:
    """Each eight bit number, the middle between neighbours, and the next numbers of either."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].unique()
    points = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.tensor([1e-45, 1e-30, 1e30, torch.inf])))
    points = torch.cat((points, -points))
    around = [points.nextafter(torch.tensor(bound)) for bound in (torch.inf, -torch.inf)]
    check_written(native, torch.cat((points, points, *around)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_slots_named_are_written(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    cache = torch.full((4, 5, 6, 8), 7.0, dtype=dtype)
    native.write_kv(cache, torch.tensor([17, 5])[::1], random(0, 2, 6, 8).to(dtype))
    changed = (cache != 7.0).flatten(1).sum(dim=1)
    assert changed.tolist() == [0, 48, 0, 48]
