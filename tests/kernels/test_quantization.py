"""Rounding weights to integers, and native products with them against float64."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from ksana.kernels.base import KernelBackend
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.kernels.quantization import QuantizedWeight, concatenate, quantize
from ksana.kernels.weights import DecoderLayerWeights
from ksana.testing.random_layer import LayerRun, LayerShape, hidden_states

DTYPES = [torch.float32, torch.bfloat16]


def random_weight(
    bits: int, rows: int, columns: int, group_size: int, dtype: torch.dtype, seed: int
) -> QuantizedWeight:
    """Codes and constants of every kind that files hold, negative scales included."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group_size)
    if bits == 8:
        codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    else:
        codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    scales = torch.randn(rows, groups, generator=generator) / 2**bits
    minima = torch.randn(rows, groups, generator=generator) if bits == 4 else None
    return QuantizedWeight(bits, group_size, codes, scales, minima, dtype)


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)


def terms_of(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """Sum of the magnitudes of all that is added up in each element of the product."""
    magnitudes = QuantizedWeight(
        weight.bits,
        weight.group_size,
        weight.codes.short().abs(),
        weight.scales.abs(),
        None if weight.minima is None else weight.minima.abs(),
        torch.float64,
    )
    return x.double().abs() @ magnitudes.dequantize().T


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    inner=st.integers(1, 200),
    group_size=st.sampled_from([4, 12, 32, 64, 128]),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@example(bits=4, rows=1, columns=33, inner=96, group_size=64, biased=True, dtype=torch.bfloat16, seed=0)
@example(bits=8, rows=13, columns=70, inner=130, group_size=128, biased=False, dtype=torch.bfloat16, seed=0)
@example(bits=8, rows=200, columns=33, inner=64, group_size=32, biased=False, dtype=torch.float32, seed=0)
@example(bits=4, rows=400, columns=33, inner=68, group_size=32, biased=False, dtype=torch.bfloat16, seed=0)
@example(bits=4, rows=3, columns=8, inner=33, group_size=32, biased=False, dtype=torch.bfloat16, seed=0)  # odd
@example(bits=8, rows=3, columns=8, inner=33, group_size=7, biased=False, dtype=torch.float32, seed=0)
def test_product_of_any_shape(
    native: NativeCPUBackend,
    bits: int,
    rows: int,
    columns: int,
    inner: int,
    group_size: int,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    weight = random_weight(bits, columns, inner, group_size, dtype, seed)
    x, bias = inputs(rows, inner, dtype, seed), torch.linspace(-1, 1, columns).to(dtype)
    packed = native.pack_linear(weight, bias if biased else None)
    expected = x.double() @ weight.dequantize(torch.float64).T
    terms = terms_of(weight, x)
    if biased:
        expected += bias.double()
        terms += bias.double().abs()
    error = (inner + 4) * 2.0**-24 * terms
    if inner % 2 or group_size % 4:  # such a weight is unpacked, and so rounded
        error += torch.finfo(dtype).eps * (x.double().abs() @ weight.dequantize(torch.float64).abs().T)
    assert ((native.logits(x, packed).double() - expected).abs() <= error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32), (4, 128)])
def test_a_row_does_not_depend_on_how_many_there_are(
    native: NativeCPUBackend, bits: int, group_size: int, dtype: torch.dtype
) -> None:
    packed = native.pack_linear(random_weight(bits, 70, 336, group_size, dtype, 0))
    x = inputs(193, 336, dtype, 0)
    everything = native.logits(x, packed)
    for rows in range(1, 41):
        assert torch.equal(native.logits(x[:rows], packed), everything[:rows])
        assert torch.equal(native.logits(x[-rows:], packed), everything[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("least", [-127, -128])
@pytest.mark.parametrize("rows", [1, 64])  # decoded while they are multiplied, and before
def test_every_integer_of_eight_bits(native: NativeCPUBackend, rows: int, least: int, dtype: torch.dtype) -> None:
    """-128 has no place in the kernels' format: a weight that holds it must not be changed by packing."""
    count = 128 - least
    codes = torch.arange(least, 128).to(torch.int8).repeat(33, 1).T.contiguous().view(33, count)
    scales = torch.ones(33, -(-count // 32))
    weight = QuantizedWeight(8, 32, codes, scales, None, dtype)
    packed = native.pack_linear(weight)
    for at in range(0, count - rows + 1, rows):
        x = torch.zeros(rows, count, dtype=dtype)
        x[torch.arange(rows), at + torch.arange(rows)] = 1.0
        assert torch.equal(native.logits(x, packed).T, codes[:, at : at + rows].float())


@dataclass(frozen=True)
class QuantizedLayerShape(LayerShape):
    bits: int = 8
    group_size: int = 32

    def weights(self, dtype: torch.dtype | None = None) -> DecoderLayerWeights:
        layer = super().weights(dtype)
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(linear.weight, torch.Tensor)
            linear.weight = quantize(linear.weight, self.bits, self.group_size, dtype or self.dtype)
        return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [16, 50])  # gate and up lie interleaved; halves of 50 fill no panel
@pytest.mark.parametrize("bits", [8, 4])
def test_layer(native: NativeCPUBackend, bits: int, inner: int, dtype: torch.dtype) -> None:
    """Against torch in float64, which computes with the same weights unpacked; and the same however it is cut."""
    shape = QuantizedLayerShape(bits=bits, inner=inner, hidden=80, biased=True, dtype=dtype)
    hidden = hidden_states(shape, 1, 40)
    reference = LayerRun(KernelBackend(), shape, max_tokens=40, max_requests=1, dtype=torch.float64)
    expected = reference.prompt(hidden, chunk=40)
    actual = [LayerRun(native, shape, max_tokens=40, max_requests=1).prompt(hidden, chunk=n) for n in (40, 1, 7)]
    tolerance = 1e-4 if dtype is torch.float32 else 0.2
    assert (actual[0].double() - expected).abs().max() < tolerance * expected.square().mean().sqrt()
    assert torch.equal(actual[1], actual[0])
    assert torch.equal(actual[2], actual[0])


def test_layer_with_some_weights_quantised(native: NativeCPUBackend) -> None:
    """Files mix formats within a layer."""
    outputs = []
    for bits in (8, 4):
        layer = QuantizedLayerShape(bits=bits).weights()
        layer.attention.output.weight = LayerShape().weights().attention.output.weight
        native.pack_layer(layer)
        outputs.append([linear.packed.struct.format for linear in (layer.attention.qkv, layer.attention.output)])
    assert outputs == [[1, 0], [2, 0]]


@given(
    bits=st.sampled_from([4, 8]),
    columns=st.integers(1, 150),
    group_size=st.sampled_from([32, 64, 128]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    offset=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_rounding(bits: int, columns: int, group_size: int, scale: float, offset: float, seed: int) -> None:
    """int8 is off by half a step at most; int4 is, over all, never worse than steps between smallest and largest."""
    weight = (torch.randn(5, columns, generator=torch.Generator().manual_seed(seed)) + offset) * scale
    quantized = quantize(weight, bits, group_size, torch.float32)
    errors = (quantized.dequantize() - weight).double()
    assert quantized.shape == weight.shape
    for start in range(0, columns, group_size):
        group, error = weight[:, start : start + group_size], errors[:, start : start + group_size]
        if bits == 8:
            step = group.abs().amax(dim=1, keepdim=True) / 127
            assert (error.abs() <= step * (0.5 + 1e-4)).all()
        else:
            low, step = group.amin(dim=1, keepdim=True), (group.amax(dim=1) - group.amin(dim=1))[:, None] / 15
            simple = ((group - low) / step.clamp_min(1e-30)).round() * step + low
            least = (simple - group).double().square().sum(dim=1)
            assert (error.square().sum(dim=1) <= least * (1 + 1e-3) + group.double().square().sum(dim=1) * 1e-12).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_equal_weights_stay_what_they_are(bits: int) -> None:
    weight = torch.tensor([[0.0] * 70, [3.0] * 70, [-0.125] * 70])
    assert torch.allclose(quantize(weight, bits, 64, torch.float32).dequantize(), weight, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-40, 1e-43])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_next_to_nothing_stay_next_to_nothing(bits: int, size: float) -> None:
    """Channels that training has let die have such weights: their scales are too small to divide by."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * size
    weight[:, :8] = 0.0
    rounded = quantize(weight, bits, 32, torch.float32).dequantize()
    assert rounded.isfinite().all()
    assert rounded.abs().max() < 3 * size


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_number_shows(bits: int, broken: float) -> None:
    weight = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    weight[1, 5] = broken
    product = quantize(weight, bits, 32, torch.float32).dequantize() @ torch.ones(96)
    assert product.isfinite().tolist() == [True, False, True]


def test_large_weights_are_rounded_piece_by_piece() -> None:
    """More rows than are in work at once, and a row that is longer than that."""
    weight = torch.randn(5000, 96, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, 4, 64, torch.bfloat16)
    halves = concatenate([quantize(half, 4, 64, torch.bfloat16) for half in weight.chunk(2)])
    assert halves is not None
    assert torch.equal(whole.dequantize(), halves.dequantize())
    long = weight[:, 0].repeat(2, 60)
    assert (quantize(long, 8, 64, torch.float32).dequantize() - long).abs().max() < 0.02


def test_parts_of_different_kinds_are_not_joined() -> None:
    weight = torch.ones(4, 128)
    parts = {key: quantize(weight, *key, torch.float32) for key in ((8, 64), (4, 64), (4, 128))}
    assert concatenate([parts[4, 64], parts[4, 128]]) is None
    assert concatenate([parts[4, 64], parts[8, 64]]) is None
    assert concatenate([parts[8, 64]]) is parts[8, 64]


def test_a_backend_without_kernels_unpacks_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend, weight = KernelBackend(), random_weight(4, 20, 64, 32, torch.float32, 0)
    x = inputs(3, 64, torch.float32, 0)
    with caplog.at_level(logging.WARNING):
        products = [backend.linear(x, backend.pack_linear(weight)) for _ in range(2)]
    assert torch.equal(products[1], x @ weight.dequantize().T)
    assert [record.getMessage() for record in caplog.records] == [
        "backend torch unpacks weights of 4 bits in groups of 32 to float32: it has no kernels for them"
    ]
