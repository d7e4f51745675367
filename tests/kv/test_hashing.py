"""Block hashes: equal for equal prefixes everywhere and for ever, different for everything else."""

from __future__ import annotations

import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from ksana.kv import BlockHasher
from ksana.types.request import InputEmbedding, Request
from ksana.types.sampling import SamplingParams

PROMPT = [1, 2, 3, 4, 5, 49_151, 2**32 - 1, 0, 9]
FIXED = [
    "9af1874ca0e88bcb016eec7b4f339caf500bdcc664edd0229b95e13822d6d2ca",
    "dd72b1c945b29884c9535cfc5e272aa383e5d2cc6520d049be61e50027c02462",
]
"""Hashes of the two full blocks of PROMPT in blocks of 4: other processes and other releases depend on them."""


def hashes_of(tokens: list[int], block_size: int = 4, root_seed: str = "ksana", **options: object) -> list[bytes]:
    request = Request("r", tokens, SamplingParams(), max_total_tokens=100, **options)  # type: ignore[arg-type]
    return list(BlockHasher(block_size, root_seed).extend(request))


def test_hashes_never_change() -> None:
    assert [value.hex() for value in hashes_of(PROMPT)] == FIXED


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from ksana.kv import BlockHasher; from ksana.types.request import Request\n"
        "from ksana.types.sampling import SamplingParams\n"
        f"r = Request('x', {PROMPT}, SamplingParams(), max_total_tokens=100)\n"
        "print(*[h.hex() for h in BlockHasher(4, 'ksana').extend(r)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == FIXED


def test_only_full_blocks_have_hashes() -> None:
    assert len(hashes_of([1, 2, 3])) == 0
    assert len(hashes_of([1, 2, 3, 4])) == 1
    assert len(hashes_of([1, 2, 3, 4, 5, 6, 7])) == 1


def test_a_hash_covers_everything_before_its_block() -> None:
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes_of([1, 2, 3, 0, 5, 6, 7, 8])[1]


def test_salt_separates() -> None:
    plain, one, two = hashes_of(PROMPT), hashes_of(PROMPT, cache_salt="one"), hashes_of(PROMPT, cache_salt="two")
    assert len({plain[0], one[0], two[0]}) == 3
    assert hashes_of(PROMPT, cache_salt="one") == one


def test_salt_may_be_any_string() -> None:
    assert hashes_of(PROMPT, cache_salt="\ud800") != hashes_of(PROMPT, cache_salt="\udfff")


def test_embeddings_separate_by_value_place_shape_and_dtype() -> None:
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    variants = [
        (InputEmbedding(0, rows),),
        (InputEmbedding(1, rows),),
        (InputEmbedding(0, rows + 1),),
        (InputEmbedding(0, rows.reshape(1, 4)),),
        (InputEmbedding(0, rows.view(np.int32)),),
        (InputEmbedding(0, rows), InputEmbedding(4, rows)),
        (),
    ]
    assert len({hashes_of(PROMPT, embeddings=variant)[0] for variant in variants}) == len(variants)
    assert hashes_of(PROMPT, embeddings=(InputEmbedding(0, rows.copy()),)) == hashes_of(PROMPT, embeddings=variants[0])


def test_salt_and_embeddings_cannot_be_confused() -> None:
    rows = np.zeros((1, 1), dtype=np.float32)
    salted = hashes_of(PROMPT, cache_salt="s", embeddings=(InputEmbedding(0, rows),))
    assert salted != hashes_of(PROMPT, cache_salt="s0:(1, 1)")
    assert salted != hashes_of(PROMPT, embeddings=(InputEmbedding(0, rows),))


def test_block_size_and_root_seed_separate() -> None:
    tokens = [7] * 8
    assert hashes_of(tokens, block_size=8)[0] not in hashes_of(tokens, block_size=4)
    assert hashes_of(tokens, root_seed="a")[0] != hashes_of(tokens, root_seed="b")[0]


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_growing_token_by_token_gives_the_same_hashes(head: list[int], tail: list[int], block_size: int) -> None:
    hasher = BlockHasher(block_size, "ksana")
    request = Request("r", head, SamplingParams(), max_total_tokens=100)
    hasher.extend(request)
    for token in tail:
        request.all_token_ids.append(token)
        hasher.extend(request)
    assert request.block_hashes == hashes_of(head + tail, block_size)


@given(
    st.lists(st.integers(0, 1), min_size=4, max_size=16),
    st.lists(st.integers(0, 1), min_size=4, max_size=16),
    st.integers(1, 4),
)
def test_hashes_are_equal_exactly_for_equal_prefixes(one: list[int], two: list[int], block_size: int) -> None:
    for index, (a, b) in enumerate(zip(hashes_of(one, block_size), hashes_of(two, block_size), strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])


def test_number_of_blocks_can_be_limited() -> None:
    request = Request("r", list(range(12)), SamplingParams(), max_total_tokens=100)
    hasher = BlockHasher(4, "ksana")
    assert len(hasher.extend(request, 1)) == 1
    assert len(hasher.extend(request)) == 3
    assert len(hasher.extend(request, 1)) == 3
