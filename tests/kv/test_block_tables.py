"""Block tables while a request runs: growth, windows, forks, capacity."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ksana.kv import KVCacheManager
from ksana.testing.paged_memory import make_kv_config
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

MakeKV = Callable[..., KVCacheManager]
MakeRequest = Callable[..., Request]


def decode(kv: KVCacheManager, request: Request, token: int = 0) -> tuple[list[int], ...] | None:
    """Append a token, make room for it and compute it; returns the new entries of the tables."""
    request.all_token_ids.append(token)
    update = kv.grow(request, 1)
    if update is None:
        return None
    request.num_computed_tokens += 1
    kv.commit(request)
    return update.block_ids


def test_table_grows_only_at_block_edges(make_kv: MakeKV, run: MakeRequest) -> None:
    kv = make_kv(10, 4)
    request = run(kv, range(3))
    changes = [decode(kv, request) for _ in range(6)]
    assert [len(change[0]) if change else None for change in changes] == [0, 1, 0, 0, 0, 1]


def test_growth_without_room_changes_nothing(make_kv: MakeKV, run: MakeRequest) -> None:
    kv = make_kv(2, 4)
    request = run(kv, range(8))
    before = kv.block_ids(request.request_id)
    assert decode(kv, request) is None
    assert kv.block_ids(request.request_id) == before
    kv.check_integrity()


def test_blocks_outside_the_window_are_given_back(make_kv: MakeKV, run: MakeRequest) -> None:
    kv = make_kv(20, 4, 6)
    request = run(kv, range(16))
    decode(kv, request)  # token 16 looks at 11 to 16
    assert [block == 0 for block in kv.block_ids(request.request_id)[0]] == [True, True, False, False, False]
    assert kv.num_free_blocks == 20 - 3


def test_window_request_never_holds_more_than_its_peak(make_kv: MakeKV, run: MakeRequest) -> None:
    for window in (1, 2, 4, 5, 6, 9):
        kv = make_kv(40, 4, window)
        request = run(kv, range(5))
        for _ in range(60):
            assert decode(kv, request) is not None
            assert 40 - kv.num_free_blocks <= kv.peak_blocks(request.num_tokens, 5)[1]


@given(
    st.sampled_from([[None], [5], [1], [None, 4], [None, 3, 8], [3, 8]]),
    st.sampled_from([1, 4]),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(1, 60),
    st.data(),
)
def test_request_of_the_largest_size_that_fits_never_lacks_a_block(
    windows: list[int | None],
    block_size: int,
    max_chunk: int,
    num_blocks: int,
    num_window_blocks: int,
    data: st.DataObject,
) -> None:
    """``max_request_tokens`` and ``peak_blocks`` are the promise that a request alone in the cache gets through."""
    kv = KVCacheManager(make_kv_config(num_blocks, block_size, windows, num_window_blocks=num_window_blocks))
    length = kv.max_request_tokens(120, max_chunk)
    assert length == 120 or not kv.fits_empty(kv.peak_blocks(length + 1, max_chunk))
    if length == 0:
        return
    request = Request("r", [1] * length, SamplingParams(), max_total_tokens=length)
    count = min(length, data.draw(st.integers(1, max_chunk)))
    assert kv.admit(request, kv.find_prefix(request), count) is not None
    while True:
        request.num_computed_tokens += count
        kv.commit(request)
        if request.num_computed_tokens == length:
            break
        count = min(length - request.num_computed_tokens, data.draw(st.integers(1, max_chunk)))
        assert kv.grow(request, count) is not None
    kv.check_integrity()


def test_fork_shares_all_blocks(make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest) -> None:
    kv = make_kv(10, 4, None, 6)
    parent = run(kv, range(10))
    free = kv.num_free_blocks
    child = fork(kv, parent, make_request)
    assert kv.block_ids(child.request_id) == kv.block_ids(parent.request_id)
    assert kv.num_free_blocks == free


def fork(kv: KVCacheManager, parent: Request, make_request: MakeRequest) -> Request:
    child = make_request(parent.all_token_ids)
    child.num_computed_tokens = parent.num_computed_tokens
    child.block_hashes = list(parent.block_hashes)
    kv.fork(parent, child, parent.num_computed_tokens)
    return child


@pytest.mark.parametrize("parent_first", [False, True])
def test_first_writer_copies_the_shared_block_and_the_last_one_keeps_it(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest, parent_first: bool
) -> None:
    """Whoever it is: a parent that filled the block in place would leave its content under its child."""
    kv = make_kv(10, 4)
    parent = run(kv, range(6))
    child = fork(kv, parent, make_request)
    first, last = (parent, child) if parent_first else (child, parent)
    shared = kv.block_ids(parent.request_id)[0][1]
    assert decode(kv, first) is not None
    own = kv.block_ids(first.request_id)[0][1]
    assert kv.take_block_copies() == [(0, shared, own)]
    assert kv.take_block_copies() == []
    assert decode(kv, last) == ([],)
    assert kv.take_block_copies() == []
    assert kv.block_ids(last.request_id)[0][1] == shared
    kv.free(parent)
    kv.free(child)
    kv.check_integrity()


def test_copy_for_a_request_that_is_gone_is_not_made(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest
) -> None:
    """The block may have another owner in the same step."""
    kv = make_kv(10, 4, None, 6)
    parent = run(kv, range(6))
    child = fork(kv, parent, make_request)
    assert decode(kv, child) is not None
    kv.free(child)
    assert kv.take_block_copies() == []


def test_fork_at_a_block_edge_copies_nothing(make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest) -> None:
    kv = make_kv(10, 4)
    parent = run(kv, range(8))
    child = fork(kv, parent, make_request)
    assert decode(kv, child) is not None
    assert decode(kv, parent) is not None
    assert kv.take_block_copies() == []
    mine, yours = kv.block_ids(parent.request_id)[0], kv.block_ids(child.request_id)[0]
    assert mine[:2] == yours[:2]
    assert mine[2] != yours[2]


def test_who_repeats_the_first_token_of_a_shared_block_gets_a_copy(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest
) -> None:
    """Sequences of one prompt compute its last token again, be it alone in its block: what follows is their own."""
    kv = make_kv(10, 4)
    parent = run(kv, range(5))
    child = fork(kv, parent, make_request)
    child.num_computed_tokens -= 1
    shared = kv.block_ids(parent.request_id)[0][1]
    assert kv.grow(child, 1) is not None
    own = kv.block_ids(child.request_id)[0][1]
    assert own != shared
    assert kv.take_block_copies() == [(0, shared, own)]


def test_who_repeats_a_token_before_a_block_edge_finds_its_window(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest
) -> None:
    """The parent has given back what its own next token does not look at; the child looks at a token more."""
    kv = make_kv(20, 4, 4, enable_prefix_caching=False)
    parent = run(kv, range(12))
    child = fork(kv, parent, make_request)
    child.num_computed_tokens -= 1  # its window begins at token 8
    assert kv.grow(child, 1) is not None
    assert [block_id > 0 for block_id in kv.block_ids(child.request_id)[0]] == [False, False, True]


def test_child_outlives_its_parent(make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest) -> None:
    kv = make_kv(10, 4)
    parent = run(kv, range(6))
    child = fork(kv, parent, make_request)
    kv.free(parent)
    assert decode(kv, child) == ([],)
    assert kv.take_block_copies() == []  # nobody else uses the block any more
    kv.free(child)
    assert kv.num_free_blocks == 10


def test_copy_on_write_without_a_free_block_changes_nothing(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest
) -> None:
    kv = make_kv(2, 4)
    parent = run(kv, range(6))
    child = fork(kv, parent, make_request)
    assert decode(kv, child) is None
    assert kv.take_block_copies() == []
    kv.check_integrity()
    kv.free(parent)
    assert kv.grow(child, 1) is not None


def test_every_group_copies_its_own_block(make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest) -> None:
    kv = make_kv(20, 4, None, 6)
    parent = run(kv, range(6))
    child = fork(kv, parent, make_request)
    sources = [table[1] for table in kv.block_ids(parent.request_id)]
    decode(kv, child)
    own = [table[1] for table in kv.block_ids(child.request_id)]
    assert kv.take_block_copies() == [(0, sources[0], own[0]), (1, sources[1], own[1])]


def test_free_of_an_unknown_request_does_nothing(make_kv: MakeKV, make_request: MakeRequest) -> None:
    kv = make_kv(2, 4)
    kv.free(make_request([1]))
    assert kv.num_free_blocks == 2


def test_a_block_that_is_found_by_content_is_copied_though_nobody_else_uses_it(
    make_kv: MakeKV, run: MakeRequest, make_request: MakeRequest
) -> None:
    """A parent went on past the prompt and is gone: what it has written stays findable, so its child must not write."""
    kv = make_kv(10, 4)
    parent = run(kv, range(8))
    child = make_request(range(6))
    child.num_computed_tokens = 5
    kv.fork(parent, child, 6)
    kv.free(parent)
    found = kv.block_ids(child.request_id)[0][1]
    assert kv.grow(child, 1) is not None
    own = kv.block_ids(child.request_id)[0][1]
    assert kv.take_block_copies() == [(0, found, own)]
    assert kv.find_prefix(make_request(range(9))).num_tokens == 8
    kv.check_integrity()
