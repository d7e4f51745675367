"""A row's result is the same, bit for bit, whatever else is computed with it, and on however many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from ksana.kernels.cpu.native import NativeKernels
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.testing.random_layer import LayerRun, LayerShape, hidden_states

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rows(operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Every row alone, every number of rows, rows in another order, and rows from the middle."""
    expected = torch.cat([operator(x[row : row + 1]) for row in range(len(x))])
    for count in range(1, len(x) + 1):
        assert torch.equal(operator(x[:count]), expected[:count])
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    assert torch.equal(operator(x[order]), expected[order])
    assert torch.equal(operator(x[7:30]), expected[7:30])


@BOTH
@pytest.mark.parametrize("shape", [(100, 64), (70, 37), (33, 300)])
def test_projections(native: NativeCPUBackend, shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = native.pack_linear(random(0, *shape, dtype=dtype), random(1, shape[0], dtype=dtype))
    check_rows(lambda x: native.logits(x, packed), random(2, 40, shape[1], dtype=dtype))


@BOTH
def test_projections_of_many_rows(native: NativeCPUBackend, dtype: torch.dtype) -> None:
    """Beyond the rows that a task takes at once."""
    packed = native.pack_linear(random(0, 70, 96, dtype=dtype))
    x = random(1, 400, 96, dtype=dtype)
    together = native.logits(x, packed)
    for rows in ([0], [191], [192], [399], list(range(180, 200)), list(range(3, 399))):
        assert torch.equal(native.logits(x[rows], packed), together[rows])


@BOTH
@pytest.mark.parametrize("size", [5, 64, 75])
def test_norms(native: NativeCPUBackend, size: int, dtype: torch.dtype) -> None:
    weight = random(0, size, dtype=dtype)
    check_rows(lambda x: native.rms_norm(x, weight, 1e-5), random(1, 40, size, dtype=dtype))


def test_soft_caps(native: NativeCPUBackend) -> None:
    packed = native.pack_linear(random(0, 70, 96))
    check_rows(lambda x: native.logits(x, packed, 2.0), random(1, 40, 96))


def test_sampling(native: NativeCPUBackend) -> None:
    logits = 3 * random(0, 40, 2100)
    rng = np.random.default_rng(0)
    temperatures, min_ps = rng.uniform(0.3, 2, 40).astype(np.float32), rng.uniform(0, 0.1, 40).astype(np.float32)
    uniforms = rng.uniform(0, 1, 40)

    def results(rows: list[int]) -> list[np.ndarray]:
        some = logits[rows]
        return [
            *native.argmax(some),
            *native.top_k(some, 30),
            native.exp_sums(some, temperatures[rows]),
            native.draw(some, temperatures[rows], min_ps[rows], uniforms[rows]),
        ]

    together = results(list(range(40)))
    for rows in ([0], [39], list(range(5, 12)), rng.permutation(40).tolist()):
        for alone, all_of_it in zip(results(rows), together, strict=True):
            assert np.array_equal(alone, all_of_it[rows])


LAYERS = {
    "tiles": LayerShape(head_size=64, heads=6, kv_heads=2),
    "norms and biases": LayerShape(head_size=32, biased=True, head_norms=True, inner=17, hidden=33),
    "ragged heads": LayerShape(head_size=24, heads=3, kv_heads=1),
    "ragged blocks": LayerShape(head_size=64, block_size=5),
    "window": LayerShape(head_size=64, window=20),
    "window of many blocks": LayerShape(head_size=16, window=70, block_size=4),
    "soft cap": LayerShape(head_size=64, soft_cap=3.0),
    "many heads for a key": LayerShape(head_size=16, heads=16, kv_heads=2),
    "gemma": LayerShape(
        hidden=75,
        head_size=32,
        window=20,
        head_norms=True,
        output_norms=True,
        precise_norms=True,
        gelu=True,
        rotary_index=1,
    ),
    "large heads": LayerShape(heads=2, kv_heads=1, head_size=256, soft_cap=5.0),
    "e4m3": LayerShape(head_size=64, cache_dtype=torch.float8_e4m3fn),
    "e5m2 key by key": LayerShape(head_size=24, cache_dtype=torch.float8_e5m2, window=33),
}


@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_of_a_prompt(native: NativeCPUBackend, name: str, dtype: torch.dtype) -> None:
    """Wherever it is cut, and whatever part of it is a hit of the prefix cache."""
    shape = replace(LAYERS[name], dtype=dtype)
    hidden = hidden_states(shape, 1, 150)
    expected = LayerRun(native, shape, 150, 1).prompt(hidden, chunk=150)
    assert expected.isfinite().all()
    for chunk in (1, 7, 16, 64, 149):
        assert torch.equal(LayerRun(native, shape, 150, 1).prompt(hidden, chunk=chunk), expected), chunk


@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_requests_of_a_batch(native: NativeCPUBackend, name: str, dtype: torch.dtype) -> None:
    """Prompts, chunks and decoding requests in one step, and each of them in a step of its own."""
    shape = replace(LAYERS[name], dtype=dtype)
    contexts, counts = [0, 70, 33, 0, 128, 1], [40, 1, 9, 1, 1, 60]
    hidden = [hidden_states(shape, seed, c + n) for seed, (c, n) in enumerate(zip(contexts, counts, strict=True))]
    results = []
    for batched in (True, False):
        run = LayerRun(native, shape, 140, len(counts))
        for number, (states, context) in enumerate(zip(hidden, contexts, strict=True)):
            if context:
                run.prompt(states[:context], chunk=50, number=number)
        rest = [(number, contexts[number], hidden[number][contexts[number] :]) for number in range(len(counts))]
        results.append(run.step(rest) if batched else [run.step([request])[0] for request in reversed(rest)][::-1])
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together, alone)


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def set_threads(native: NativeCPUBackend, native_kernels: NativeKernels) -> Iterator[Callable[[int], None]]:
    yield native_kernels.set_threads
    native_kernels.set_threads(native.threads)


def results_of(native: NativeCPUBackend, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Every operator that is spread over threads, once."""
    shape = LayerShape(dtype=dtype, hidden=72, inner=100, head_size=32, seed=seed)
    packed = native.pack_linear(random(seed, 300, 50, dtype=dtype))
    logits = native.logits(random(seed + 1, 37, 50, dtype=dtype), packed)
    of_many_rows = native.logits(random(seed + 2, 500, 50, dtype=dtype), packed)
    temperatures, nothing = np.ones(37, dtype=np.float32), np.zeros(37, dtype=np.float32)
    sampled = [
        *native.likeliest(random(seed + 1, 37, 50, dtype=dtype), packed),
        *native.argmax(logits),
        *native.top_k(logits, 5),
        native.exp_sums(logits, temperatures),
        native.draw(logits, temperatures, nothing, np.linspace(0, 0.99, 37)),
    ]
    norms = native.rms_norm(random(seed, 50, 72, dtype=dtype), random(seed, 72, dtype=dtype), 1e-5)
    layer = LayerRun(native, shape, 70, 1).prompt(hidden_states(shape, seed, 70), chunk=70)
    return [logits, of_many_rows, *map(torch.from_numpy, sampled), norms, layer]


@BOTH
def test_any_number_of_threads(
    native: NativeCPUBackend, set_threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    """The pool grows and shrinks between calls."""
    set_threads(1)
    expected = results_of(native, dtype)
    for threads in (3, 2, 5, 1, 2):
        set_threads(threads)
        for actual, alone in zip(results_of(native, dtype), expected, strict=True):
            assert torch.equal(actual, alone), threads


def test_calls_of_several_threads_at_once(native: NativeCPUBackend) -> None:
    """One of them gets the pool, the others compute by themselves, and nobody's work is mixed up."""
    expected = {seed: results_of(native, torch.bfloat16, seed) for seed in range(3)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(10):
            actual = results_of(native, torch.bfloat16, seed)
            if not all(torch.equal(a, e) for a, e in zip(actual, expected[seed], strict=True)):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
