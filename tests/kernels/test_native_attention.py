"""Native attention where the kit for all backends does not go: every shape of head and block, eight bit caches."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ksana.kernels.batch import AttentionBatch
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.testing.kernel_backend import AttentionCase, check_attention

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]

SHAPES = st.builds(
    AttentionCase,
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4).map(tuple),
    block_size=st.sampled_from([1, 2, 3, 8, 16, 24, 32, 48, 64]),
    window=st.one_of(st.none(), st.integers(1, 100)),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 8),
    head_size=st.sampled_from([8, 16, 24, 32, 64, 80, 96, 128, 256]),
    soft_cap=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**16),
)
CACHES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"cache_dtype": st.sampled_from(FLOAT8), "kv_scale": st.sampled_from([1.0, 0.02, 3.0])}),
)
CASES = st.builds(lambda case, cache: dataclasses.replace(case, **cache), SHAPES, CACHES)


@settings(max_examples=100)
@given(case=CASES)
def test_any_shape(native: NativeCPUBackend, case: AttentionCase) -> None:
    check_attention(native, case)


@pytest.mark.parametrize("cache_dtype", ["", *FLOAT8])
@pytest.mark.parametrize("head_size", [24, 64])
def test_long_contexts(native: NativeCPUBackend, head_size: int, cache_dtype: str) -> None:
    """Many blocks of keys, so that the running softmax is carried on often; more heads than rows in a task."""
    requests = ((1030, 1), (0, 200), (700, 33))
    for window, group in ((None, 3), (500, 40)):
        check_attention(
            native,
            AttentionCase(
                requests,
                window=window,
                num_kv_heads=1,
                group_size=group,
                head_size=head_size,
                dtype="bfloat16",
                cache_dtype=cache_dtype,
            ),
        )


def attend_each(
    native: NativeCPUBackend, values: torch.Tensor, cache_dtype: torch.dtype, block_size: int
) -> torch.Tensor:
    """Attention over one token of one head for each row of ``values``: they come back as they were stored."""
    rows, size = values.shape
    cache = torch.zeros(rows, block_size, 2, size, dtype=cache_dtype)
    cache.view(torch.uint8).fill_(0x7F)  # not a number, in both formats
    slots = torch.arange(rows) * block_size
    native.write_kv(cache, slots, torch.stack((torch.zeros_like(values), values), dim=1))
    batch = AttentionBatch(
        query_starts=np.arange(rows + 1),
        context_lens=np.zeros(rows, dtype=np.int64),
        block_tables=np.arange(rows)[:, None],
        slot_mapping=slots.numpy(),
        block_size=block_size,
        sliding_window=None,
    )
    weights = AttentionCase(((0, 1),), num_kv_heads=1, group_size=1, head_size=size).weights()
    query = torch.ones(rows, 1, size, dtype=values.dtype)
    return native.attention(query, query, cache, native.build_attention_metadata(batch), weights)[:, 0]


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_eight_bit_number_is_read_as_what_it_is(
    native: NativeCPUBackend, cache_dtype: torch.dtype, dtype: torch.dtype, block_size: int
) -> None:
    """Whether the cache is read by tiles or key by key."""
    numbers = torch.arange(256, dtype=torch.uint8).view(cache_dtype).to(dtype)
    numbers = numbers[numbers.isfinite()]
    values = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 16)
    assert torch.equal(attend_each(native, values, cache_dtype, block_size), values)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_no_number_stays_so_in_eight_bits(
    native: NativeCPUBackend, cache_dtype: torch.dtype, block_size: int
) -> None:
    values = torch.ones(3, 16)
    values[1, 5] = torch.nan
    attended = attend_each(native, values, cache_dtype, block_size)
    assert attended[[0, 2]].eq(1).all()
    assert attended[1, 5].isnan()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_request_breaks_no_other_and_is_seen(
    native: NativeCPUBackend, dtype: torch.dtype, block_size: int
) -> None:
    """Its own result must not be a number, or nobody would end it."""
    values = torch.ones(3, 16, dtype=dtype)
    values[1, 5] = torch.nan
    attended = attend_each(native, values, dtype, block_size)
    assert attended[[0, 2]].eq(1).all()
    assert attended[1, 5].isnan()


def test_sharp_scores(native: NativeCPUBackend) -> None:
    """Differences of hundreds between scores: weights of 0 and of 1, no overflow."""
    case = AttentionCase(((0, 70), (100, 1)), num_kv_heads=1, group_size=2, head_size=64)
    weights = case.weights()
    keys = torch.zeros(71, 64)
    keys[:, 0] = torch.arange(71) * 40.0
    values = torch.arange(71.0)[:, None].expand(71, 64)
    cache = torch.zeros(10, 16, 2, 64)
    slots = torch.arange(71) + 16
    native.write_kv(cache, slots, torch.stack((keys, values), dim=1))
    batch = AttentionBatch(
        query_starts=np.array([0, 71]),
        context_lens=np.array([0]),
        block_tables=np.arange(1, 6)[None],
        slot_mapping=slots.numpy(),
        block_size=16,
        sliding_window=None,
    )
    metadata = native.build_attention_metadata(batch)
    query = torch.zeros(71, 2, 64)
    query[:, 0, 0], query[:, 1, 0] = 100.0, -100.0
    attended = native.attention(query, query, cache, metadata, weights)
    assert torch.equal(attended[:, 0, 0], torch.arange(71.0)), "the last key is the largest by far"
    assert torch.equal(attended[:, 1, 0], torch.zeros(71)), "the first key is the largest by far"
