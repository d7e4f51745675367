"""Whole native layers, packed and fused, against plain torch in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, example, given

from ksana.kernels.base import KernelBackend
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.testing.random_layer import LayerRun, LayerShape, hidden_states

SHAPES = st.builds(
    LayerShape,
    hidden=st.integers(8, 70),  # norms of fewer numbers are ill-conditioned
    inner=st.integers(1, 70),
    heads=st.sampled_from([2, 4, 6]),
    kv_heads=st.sampled_from([1, 2]),
    head_size=st.sampled_from([8, 16, 24, 64, 80]),
    biased=st.booleans(),
    head_norms=st.booleans(),
    output_norms=st.booleans(),
    precise_norms=st.booleans(),
    gelu=st.booleans(),
    rotary_index=st.integers(0, 1),
    window=st.sampled_from([None, None, 3]),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)


def check(native: NativeCPUBackend, shape: LayerShape, rtol: float) -> None:
    """A prompt, then another beside the first one's next token."""
    outputs = []
    for backend, dtype in ((native, shape.dtype), (KernelBackend(), torch.float64)):
        run = LayerRun(backend, shape, max_tokens=30, max_requests=2, dtype=dtype)
        first = run.step([(0, 0, hidden_states(shape, 1, 21))])
        second = run.step([(0, 21, hidden_states(shape, 2, 1)), (1, 0, hidden_states(shape, 3, 5))])
        outputs.append(torch.cat(first + second).double())
    actual, expected = outputs
    # Relative to the usual size of an element: any may happen to be near 0 as the difference of larger ones.
    assert (actual - expected).abs().max() < rtol * expected.square().mean().sqrt()


@given(shape=SHAPES)
@example(shape=LayerShape(inner=5))
@example(shape=LayerShape(inner=17, hidden=33, biased=True))
@example(shape=LayerShape(inner=48, biased=True, dtype=torch.bfloat16))
@example(shape=LayerShape(hidden=300, inner=17, output_norms=True))  # wider than what lies between, by far
@example(shape=LayerShape(heads=2, kv_heads=1, head_size=256, soft_cap=2.0, dtype=torch.bfloat16))
def test_layer_of_any_shape(native: NativeCPUBackend, shape: LayerShape) -> None:
    """Ragged sizes of the two halves that lie interleaved, above all."""
    assume(shape.inner >= 8 or not shape.output_norms)  # a norm of what is nearly 0 by chance magnifies every rounding
    check(native, shape, 1e-4 if shape.dtype is torch.float32 else 0.2)


@pytest.mark.parametrize("rows", [13, 193, 400])
def test_many_rows(native: NativeCPUBackend, rows: int) -> None:
    """More than a tile, and more than a task takes at once."""
    shape = LayerShape(hidden=40, inner=17)
    outputs = []
    for backend, dtype in ((native, torch.float32), (KernelBackend(), torch.float64)):
        run = LayerRun(backend, shape, max_tokens=rows, max_requests=1, dtype=dtype)
        outputs.append(run.prompt(hidden_states(shape, 1, rows), chunk=rows).double())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_layers_in_a_row_for_many_requests(native: NativeCPUBackend, window: int | None, dtype: torch.dtype) -> None:
    """So many that a layer has time to fetch what the next one reads, of some nothing and of some several blocks."""
    shape = LayerShape(hidden=40, inner=48, block_size=4, window=window, dtype=dtype)
    lengths = [number % 21 for number in range(33)]
    prompts = [(n, 0, hidden_states(shape, n, length)) for n, length in enumerate(lengths) if length]
    following = [(n, length, hidden_states(shape, 100 + n, 1)) for n, length in enumerate(lengths)]
    outputs = []
    for backend, precise in ((native, dtype), (KernelBackend(), torch.float64)):
        run = LayerRun(backend, shape, max_tokens=24, max_requests=33, dtype=precise, num_layers=3)
        run.compute(prompts)
        outputs.append(run.compute(following).double())
    actual, expected = outputs
    tolerance = 1e-4 if dtype is torch.float32 else 0.2
    assert (actual - expected).abs().max() < tolerance * expected.square().mean().sqrt()


@pytest.mark.parametrize("rows", [[0], [24], [3, 20, 22], [0, 1, 19, 20, 24]])
def test_wanted_rows_are_those_of_the_whole_batch(native: NativeCPUBackend, rows: list[int]) -> None:
    """To the bit, though their attention and all behind it goes without the others."""
    shape = LayerShape(dtype=torch.bfloat16)
    requests = [(0, 0, hidden_states(shape, 1, 20)), (1, 0, hidden_states(shape, 2, 5))]
    index = torch.tensor(rows)
    runs = [LayerRun(native, shape, max_tokens=30, max_requests=2) for _ in range(2)]
    everything = runs[0].compute(requests)
    assert torch.equal(runs[1].compute(requests, index), everything[index])
    # What went into the cache is complete, too.
    following = [(0, 20, hidden_states(shape, 3, 1))]
    assert torch.equal(runs[1].compute(following), runs[0].compute(following))


def test_a_chunk_of_which_nothing_is_wanted_is_in_the_cache(native: NativeCPUBackend) -> None:
    shape = LayerShape()
    run = LayerRun(native, shape, max_tokens=30, max_requests=1)
    empty = run.compute([(0, 0, hidden_states(shape, 1, 20))], torch.tensor([], dtype=torch.int64))
    assert empty.shape == (0, shape.hidden)
    hidden = run.compute([(0, 20, hidden_states(shape, 2, 1))])
    lone = LayerRun(native, shape, max_tokens=30, max_requests=1)
    lone.compute([(0, 0, hidden_states(shape, 1, 20))])
    assert torch.equal(lone.compute([(0, 20, hidden_states(shape, 2, 1))]), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
def test_large_activations(native: NativeCPUBackend, dtype: torch.dtype, gelu: bool) -> None:
    """Some models have channels in the thousands; a sigmoid must not overflow on the way."""
    shape = LayerShape(inner=17, dtype=dtype, gelu=gelu, output_norms=gelu)
    layer, run = shape.weights(), LayerRun(native, shape, max_tokens=20, max_requests=1)
    assert layer.eps > 0
    hidden = hidden_states(shape, 1, 20)
    hidden[:, 3] = 30000.0
    hidden[5] = 0.0
    assert run.prompt(hidden, chunk=20).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_request_stays_broken_and_breaks_no_other(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    shape = LayerShape(dtype=dtype)
    run = LayerRun(native, shape, max_tokens=20, max_requests=3)
    good, bad = hidden_states(shape, 1, 20), hidden_states(shape, 2, 20)
    bad[7, 5] = torch.nan
    outputs = run.step([(0, 0, good), (1, 0, bad), (2, 0, good)])
    assert torch.equal(outputs[0], outputs[2])
    assert outputs[0].isfinite().all()
    assert outputs[1][7:].isnan().all(), "every later token looks at it"
