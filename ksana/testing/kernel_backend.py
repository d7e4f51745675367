"""Conformance kit for kernel backends. Needs pytest and hypothesis.

Subclass :class:`KernelBackendTests` in a test module of your plugin and give it your backend::

    class TestMyBackend(KernelBackendTests):
        @pytest.fixture
        def backend(self):
            return MyBackend(KernelConfig())

The tests use the interface alone, so the layout of the cache and whatever is fused behind an operator are yours.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import AttentionBatch, KVCache, StepContext
from ksana.kernels.quantization import quantize
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec

_INHERITED = [HealthCheck.differing_executors, HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Several subclasses run one inherited test, each with its own backend, which keeps no state between examples."""

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Absolute, for results of order one."""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A batch to attend with.

    Attributes:
        requests: (tokens in the cache before the step, new tokens) of each row.
        soft_cap: of the scores; 0 for none.
        dtype: of queries and outputs.
        cache_dtype: of the cache, if not the same.
        kv_scale: what keys and values are divided by in a cache of eight bits.
    """

    requests: tuple[tuple[int, int], ...]
    block_size: int = 16
    window: int | None = None
    num_kv_heads: int = 2
    group_size: int = 2
    head_size: int = 32
    soft_cap: float = 0.0
    dtype: str = "float32"
    cache_dtype: str = ""
    kv_scale: float = 1.0
    seed: int = 0

    def kv_config(self) -> KVCacheConfig:
        """Enough blocks for all, as many again that nobody may read, and the null block."""
        needed = sum(-(-(context + new) // self.block_size) for context, new in self.requests)
        shape = (self.block_size, self.num_kv_heads, self.head_size, self.cache_dtype or self.dtype)
        spec: KVCacheSpec = FullAttentionSpec(*shape)
        if self.window is not None:
            spec = SlidingWindowSpec(*shape, self.window)
        return KVCacheConfig((KVCacheGroup(spec, (0,), 2 * needed + 1),))

    def weights(self) -> AttentionWeights:
        """Head counts, scales and soft cap; the projections are not used."""
        unused = Linear(torch.empty(0))
        heads = self.num_kv_heads * self.group_size
        shape = (heads, self.num_kv_heads, self.head_size)
        scale = self.head_size**-0.5
        return AttentionWeights(unused, unused, *shape, scale, 0, soft_cap=self.soft_cap, kv_scale=self.kv_scale)


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 90), st.just(1)),
        st.tuples(st.integers(0, 60), st.integers(1, 40)),
        st.tuples(st.just(0), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=6,
).map(tuple)

ATTENTION_CASES = st.builds(
    AttentionCase,
    requests=REQUESTS,
    block_size=st.sampled_from([1, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 8), st.sampled_from([16, 17, 33])),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group_size=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([16, 64]),
    soft_cap=st.sampled_from([0.0, 0.0, 0.5, 20.0]),
    seed=st.integers(0, 2**16),
)

EDGE_CASES = {
    "one token": AttentionCase(((0, 1),)),
    "block exactly full": AttentionCase(((15, 1), (16, 1), (0, 16), (16, 16))),
    "window exactly full": AttentionCase(((7, 1), (8, 1), (9, 1), (0, 8), (0, 9)), block_size=4, window=8),
    "window of one": AttentionCase(((5, 1), (5, 3), (0, 4)), block_size=4, window=1),
    "window ends at a block's edge": AttentionCase(((11, 1), (12, 5), (13, 6)), block_size=4, window=4),
    "very different lengths": AttentionCase(tuple((n, 1) for n in (0, 1, 3, 40, 41, 200, 700))),
    "long prompt": AttentionCase(((0, 1100),), num_kv_heads=1),
    "long prompt after a context": AttentionCase(((100, 1030), (0, 3)), num_kv_heads=1),
    "long prompt with a window": AttentionCase(((0, 1300), (40, 600)), num_kv_heads=1, window=530),
    "long prompt with a short window": AttentionCase(((0, 1030), (3, 1030)), num_kv_heads=1, window=3),
    "bfloat16": AttentionCase(((0, 30), (17, 1), (50, 9)), dtype="bfloat16", window=20),
    "float16": AttentionCase(((0, 30), (17, 1), (50, 9)), dtype="float16"),
}


class KernelBackendTests:
    """What every backend must do. Override :meth:`backend`; narrow ``dtypes`` if the device has fewer."""

    dtypes = ("float32", "bfloat16", "float16")

    @pytest.fixture
    def backend(self) -> KernelBackend:
        """The backend under test."""
        raise NotImplementedError("override the fixture called backend")

    # -- attention ---------------------------------------------------------------------------------------------

    @settings(deadline=None, suppress_health_check=_INHERITED)
    @given(case=ATTENTION_CASES)
    def test_attention_equals_the_oracle(self, backend: KernelBackend, case: AttentionCase) -> None:
        """Mixed batches of prompts, chunks and decoding requests, whatever else the blocks hold."""
        check_attention(backend, case)

    @pytest.mark.parametrize("name", EDGE_CASES)
    def test_attention_at_the_edges(self, backend: KernelBackend, name: str) -> None:
        case = EDGE_CASES[name]
        if case.dtype not in self.dtypes:
            pytest.skip(f"{backend.name} has no {case.dtype}")
        check_attention(backend, case)

    @pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2"])
    def test_attention_over_eight_bits(self, backend: KernelBackend, cache_dtype: str) -> None:
        """Without a factor, with one, and with one so small that numbers must be cut."""
        if cache_dtype not in backend.kv_cache_dtypes("float32"):
            pytest.skip(f"{backend.name} has no such cache")
        for kv_scale in (1.0, 0.02, 1e-5):
            for soft_cap, window in ((0.0, None), (20.0, 20)):
                check_attention(
                    backend,
                    AttentionCase(
                        ((0, 30), (17, 1), (50, 9)),
                        window=window,
                        soft_cap=soft_cap,
                        cache_dtype=cache_dtype,
                        kv_scale=kv_scale,
                    ),
                )

    @pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
    def test_copied_blocks_hold_what_the_sources_held(self, backend: KernelBackend, cache_dtype: str) -> None:
        """Also when a source is a destination of another copy: all sources are read first."""
        if cache_dtype not in backend.kv_cache_dtypes("float32"):
            pytest.skip(f"{backend.name} has no such cache")
        run = _AttentionRun(backend, AttentionCase(((7, 1),), block_size=4, cache_dtype=cache_dtype))
        before = run.attend()
        [first, second] = run.tables[0][:2]
        backend.copy_blocks(run.cache, [(0, second, first), (0, first, second)])
        run.batch.block_tables[0, :2] = [second, first]
        run.batch.slot_mapping[0] = first * 4 + 3
        torch.testing.assert_close(run.attend(), before)

    # -- single operators --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("bias", [False, True])
    def test_linear(self, backend: KernelBackend, bias: bool) -> None:
        for rows in (1, 2, 33):
            x, weight, b = _randn(backend, 0, rows, 48), _randn(backend, 1, 40, 48), _randn(backend, 2, 40)
            expected = x.double() @ weight.double().T + (b.double() if bias else 0)
            packed = backend.pack_linear(weight.clone(), b.clone() if bias else None)
            _assert_close(backend.linear(x, packed), expected)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_linear_with_a_quantised_weight(self, backend: KernelBackend, bits: int) -> None:
        """With kernels for it or by unpacking it: the product is that of the numbers it stands for."""
        weight = quantize(_randn(backend, 1, 40, 96).cpu(), bits, 32, torch.float32)
        expected = weight.dequantize(torch.float64).to(backend.device)
        packed = backend.pack_linear(weight)
        for rows in (1, 2, 33):
            x = _randn(backend, 0, rows, 96)
            _assert_close(backend.linear(x, packed), x.double() @ expected.T)

    def test_tied_head(self, backend: KernelBackend) -> None:
        """One matrix, of which rows are looked up, and which is multiplied with."""
        ids = torch.tensor([5, 0, 39, 5], device=backend.device)
        for dtype in self.dtypes:
            weight = _randn(backend, 1, 40, 96).to(getattr(torch, dtype))
            x = _randn(backend, 0, 3, 96).to(weight.dtype)
            head = backend.pack_tied_head(Linear(weight.clone()))
            assert torch.equal(backend.embed(ids, head), weight[ids])
            expected = x.double() @ weight.double().T
            torch.testing.assert_close(backend.logits(x, head).double(), expected, rtol=0.02, atol=0.02)

    def test_rms_norm(self, backend: KernelBackend) -> None:
        x, weight = 3 * _randn(backend, 0, 7, 48), _randn(backend, 1, 48)
        x[3] = 0.0
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        _assert_close(backend.rms_norm(x, weight, 1e-5), x.double() * scale * weight.double())

    def test_rms_norm_with_a_weight_of_more_digits(self, backend: KernelBackend) -> None:
        x, weight = _randn(backend, 0, 7, 48).bfloat16(), 1 + 0.01 * _randn(backend, 1, 48)
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = backend.rms_norm(x, weight, 1e-5)
        assert normed.dtype is torch.bfloat16
        expected = x.double() * scale * weight.double()
        assert ((normed.double() - expected) / expected).abs().max() < 2**-8  # one rounding of eight digits

    def test_rms_norm_of_single_heads(self, backend: KernelBackend) -> None:
        x, weight = _randn(backend, 0, 5, 3, 16), _randn(backend, 1, 16)
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        _assert_close(backend.rms_norm(x, weight, 1e-6), x.double() * scale * weight.double())

    def test_rotary_turns_pairs_of_halves(self, backend: KernelBackend) -> None:
        x, angles = _randn(backend, 0, 6, 3, 16), _randn(backend, 1, 6, 1, 8)
        cos = torch.cat((angles.cos(), angles.cos()), -1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
        a, b = x.double().chunk(2, -1)
        c, s = angles.double().cos(), angles.double().sin()
        expected = torch.cat((a * c - b * s, b * c + a * s), -1)
        assert backend.rotary(x, cos, sin) is x
        _assert_close(x, expected)

    def test_silu_and_mul(self, backend: KernelBackend) -> None:
        gate_up = 4 * _randn(backend, 0, 5, 24)
        gate, up = gate_up.double().chunk(2, -1)
        _assert_close(backend.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)

    def test_gelu_and_mul(self, backend: KernelBackend) -> None:
        gate_up = 4 * _randn(backend, 0, 5, 24)
        gate, up = gate_up.double().chunk(2, -1)
        slope = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        _assert_close(backend.gelu_and_mul(gate_up), gate / 2 * (1 + slope.tanh()) * up)

    def test_logits_with_a_soft_cap(self, backend: KernelBackend) -> None:
        x, weight = 3 * _randn(backend, 0, 5, 48), _randn(backend, 1, 40, 48)
        expected = 6 * torch.tanh(x.double() @ weight.double().T / 6)
        _assert_close(backend.logits(x, backend.pack_linear(weight.clone()), 6.0), expected)

    # -- blocks of a layer -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("options", [(), ("qk_norm",), ("bias",), ("qk_norm", "bias"), ("qk_norm", "gemma")])
    def test_decoder_layer_equals_plain_torch(self, backend: KernelBackend, options: tuple[str, ...]) -> None:
        """A layer may be fused in any way; it must be the layer that the defaults of the interface spell out."""
        _assert_close(_run_layer(backend, *options), _run_layer(KernelBackend(), *options))

    # -- memory ------------------------------------------------------------------------------------------------

    def test_memory_is_known(self, backend: KernelBackend) -> None:
        assert backend.available_memory() > 0

    def test_fresh_cache_is_finite(self, backend: KernelBackend) -> None:
        """Kernels may load whole blocks and mask afterwards."""
        for tensor in backend.allocate_kv_cache(AttentionCase(((9, 1),)).kv_config()).tensors.values():
            assert torch.isfinite(tensor).all()


class _AttentionRun:
    """Random keys, values and queries of a case, written through the backend into a cache full of NaN."""

    def __init__(self, backend: KernelBackend, case: AttentionCase) -> None:
        self.backend, self.case = backend, case
        self.config = case.kv_config()
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.cache: KVCache = backend.allocate_kv_cache(self.config)
        rng = np.random.default_rng(case.seed)
        lengths = [context + new for context, new in case.requests]
        self.history = [self._random(rng, n, 2 * case.num_kv_heads) for n in lengths]
        self.query = self._random(rng, sum(new for _, new in case.requests), case.num_kv_heads * case.group_size)
        self.tables = self._tables(rng, lengths)
        self.batch = self._batch(rng)
        self._fill()

    def attend(self) -> torch.Tensor:
        """Write the new tokens and attend; [T, num_heads, head_size]."""
        case, backend = self.case, self.backend
        kv = torch.cat([h[context:] for h, (context, _) in zip(self.history, case.requests, strict=True)])
        kv = kv.to(backend.device)
        layer_cache = self.cache.layer(0)[1]
        metadata = backend.build_attention_metadata(self.batch)
        backend.write_kv(layer_cache, metadata.slot_mapping, kv, case.kv_scale)
        return backend.attention(self.query.to(backend.device), kv, layer_cache, metadata, case.weights()).cpu()

    def expected(self) -> torch.Tensor:
        """The same in float64, without pages, one request at a time."""
        case, outputs, start = self.case, [], 0
        for kv, (context, new) in zip(self.history, case.requests, strict=True):
            query = self.query[start : start + new].double().view(new, case.num_kv_heads, case.group_size, -1)
            stored = self._stored(kv)
            keys, values = stored[:, : case.num_kv_heads], stored[:, case.num_kv_heads :]
            scores = torch.einsum("qhgd,khd->hgqk", query, keys) * case.head_size**-0.5
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            distance = torch.arange(context, context + new)[:, None] - torch.arange(context + new)[None]
            hidden = distance < 0 if case.window is None else (distance < 0) | (distance >= case.window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2))
            start += new
        return torch.cat(outputs)

    def _stored(self, kv: torch.Tensor) -> torch.Tensor:
        """What a cache of its dtype has left of keys and values: float64. What is too large for it is cut."""
        dtype: torch.dtype = getattr(torch, self.case.cache_dtype or self.case.dtype)
        largest, scale = torch.finfo(dtype).max, self.case.kv_scale
        return (kv.float() / scale).clamp(-largest, largest).to(dtype).double() * scale

    def _random(self, rng: np.random.Generator, tokens: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((tokens, heads, self.case.head_size))).to(self.dtype)

    def _tables(self, rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
        size = self.case.block_size
        counts = [-(-length // size) for length in lengths]
        ids = iter((rng.permutation(self.config.groups[0].num_blocks - 1) + 1).tolist())
        tables = [[next(ids) for _ in range(count)] for count in counts]
        self.unused = list(ids)
        return tables

    def _batch(self, rng: np.random.Generator) -> AttentionBatch:
        case, size = self.case, self.case.block_size
        # Entries past a request's end, and those that its window has left behind, name blocks of nobody.
        width = max(len(table) for table in self.tables)
        block_tables = rng.choice(self.unused, (len(self.tables), width)).astype(np.int64)
        slots: list[int] = []
        for row, (table, (context, new)) in enumerate(zip(self.tables, case.requests, strict=True)):
            first = 0 if case.window is None else max(0, context - case.window + 1) // size
            block_tables[row, first : len(table)] = table[first:]
            slots += [table[p // size] * size + p % size for p in range(context, context + new)]
        return AttentionBatch(
            query_starts=np.cumsum([0, *(new for _, new in case.requests)], dtype=np.int64),
            context_lens=np.array([context for context, _ in case.requests], dtype=np.int64),
            block_tables=block_tables,
            slot_mapping=np.array(slots, dtype=np.int64),
            block_size=size,
            sliding_window=case.window,
        )

    def _fill(self) -> None:
        case, size, device = self.case, self.case.block_size, self.backend.device
        layer_cache = self.cache.layer(0)[1]
        everything = torch.arange(self.config.groups[0].num_blocks * size, device=device)
        nan = torch.full((len(everything), 2 * case.num_kv_heads, case.head_size), float("nan"), dtype=self.dtype)
        self.backend.write_kv(layer_cache, everything, nan.to(device))
        for table, kv, (context, _) in zip(self.tables, self.history, case.requests, strict=True):
            first = 0 if case.window is None else max(0, context - case.window + 1) // size * size
            slots = [table[p // size] * size + p % size for p in range(first, context)]
            if slots:
                kv = kv[first:context].to(device)
                self.backend.write_kv(layer_cache, torch.tensor(slots, device=device), kv, case.kv_scale)


def check_attention(backend: KernelBackend, case: AttentionCase) -> None:
    """Compare a backend's paged attention with dense attention in float64.

    Every slot that no query may look at is NaN: the null block, unused blocks, the rest of a last block, and blocks
    that a sliding window has left.
    """
    run = _AttentionRun(backend, case)
    actual = run.attend()
    assert actual.dtype == run.dtype
    assert torch.isfinite(actual).all(), "something was read that nobody has written"
    torch.testing.assert_close(actual.double(), run.expected(), rtol=0, atol=TOLERANCES[run.dtype])


def _run_layer(backend: KernelBackend, *options: str) -> torch.Tensor:
    """A prompt of 5 tokens, then one more token of it beside another prompt, through one random layer."""
    qk_norm, bias, gemma = (option in options for option in ("qk_norm", "bias", "gemma"))
    hidden_size, heads, kv_heads, size, inner, block = 32, 4, 2, 16, 48, 4

    def linear(seed: int, rows: int, columns: int) -> Linear:
        weight = _randn(backend, seed, rows, columns) * columns**-0.5
        return backend.pack_linear(weight, _randn(backend, seed + 100, rows) if bias else None)

    layer = DecoderLayerWeights(
        input_norm=_randn(backend, 1, hidden_size),
        attention=AttentionWeights(
            qkv=linear(2, (heads + 2 * kv_heads) * size, hidden_size),
            output=linear(3, hidden_size, heads * size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            scale=size**-0.5,
            layer_index=0,
            rotary_index=1 if gemma else 0,
            q_norm=_randn(backend, 4, size) if qk_norm else None,
            k_norm=_randn(backend, 5, size) if qk_norm else None,
        ),
        mlp_input_norm=_randn(backend, 6, hidden_size),
        mlp=GatedMLPWeights(
            linear(7, 2 * inner, hidden_size), linear(8, hidden_size, inner), "gelu_tanh" if gemma else "silu"
        ),
        eps=1e-5,
        attention_output_norm=_randn(backend, 9, hidden_size) if gemma else None,
        mlp_output_norm=_randn(backend, 10, hidden_size) if gemma else None,
    )
    config = KVCacheConfig((KVCacheGroup(FullAttentionSpec(block, kv_heads, size, "float32"), (0,), 8),))
    cache = backend.allocate_kv_cache(config)
    tables = np.array([[3, 5], [7, 0]], dtype=np.int64)
    outputs = []
    for rows in ([(0, 0, 5)], [(0, 5, 1), (1, 0, 3)]):
        tokens = [(row, position) for row, context, new in rows for position in range(context, context + new)]
        batch = AttentionBatch(
            query_starts=np.cumsum([0, *(new for _, _, new in rows)], dtype=np.int64),
            context_lens=np.array([context for _, context, _ in rows], dtype=np.int64),
            block_tables=tables[[row for row, _, _ in rows]],
            slot_mapping=np.array([tables[row, p // block] * block + p % block for row, p in tokens], dtype=np.int64),
            block_size=block,
            sliding_window=None,
        )
        positions = torch.tensor([position for _, position in tokens], device=backend.device)
        angles = positions[:, None, None] * torch.linspace(1, 0.1, size // 2, device=backend.device)
        context = StepContext(
            rotary=[
                (torch.cat((a.cos(), a.cos()), -1), torch.cat((-a.sin(), a.sin()), -1)) for a in (angles, 0.3 * angles)
            ],
            attention=[backend.build_attention_metadata(batch)],
            cache=cache,
        )
        outputs.append(backend.decoder_layer(_randn(backend, 20 + len(rows), len(tokens), hidden_size), layer, context))
    return torch.cat(outputs).cpu()


def _randn(backend: KernelBackend, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=1e-4, atol=TOLERANCES[actual.dtype])
