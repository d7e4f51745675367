"""Remote cache loading: what may be called when, what becomes of the blocks, and that none is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ksana.kv import KVCacheManager, RemoteLoadingError
from ksana.testing.paged_memory import make_kv_config
from ksana.types.request import Request

MakeKV = Callable[..., KVCacheManager]
MakeRequest = Callable[..., Request]

BLOCK = 4


def begin(kv: KVCacheManager, request: Request, num_tokens: int) -> tuple[list[int], ...]:
    """Allocate for a load of the request's tokens up to ``num_tokens``; returns the table."""
    remote = kv.remote_loading
    prefix = remote.get_request_prefix_block_number_before_remote_cache_loading(request, kv.find_prefix(request))
    wanted = -(-num_tokens // BLOCK) - prefix.fa_block_num
    table = remote.allocate_blocks_for_remote_cache(request, wanted, remote.num_swa_blocks_for(num_tokens))
    assert table is not None
    return table


def confirm(kv: KVCacheManager, request: Request, matched: int, lacking: int = 0, reserved: int = 0) -> int:
    """All window blocks but the first ``lacking`` have arrived."""
    arrived = range(lacking, len(kv.remote_loading.remote_swa_blocks(request)))
    return kv.remote_loading.confirm_remote_cache_loading_result(request, matched, arrived, reserved)


def held(kv: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    return [block_id for block_id in kv.block_ids(request.request_id)[group] if block_id]


def test_full_match_is_findable_only_once_it_is_confirmed(make_kv: MakeKV, make_request: MakeRequest) -> None:
    kv = make_kv(10, BLOCK)
    request = make_request(range(20))
    table = begin(kv, request, 16)
    assert [len(ids) for ids in table] == [4]
    assert kv.remote_loading.is_remote_loading(request)
    assert kv.find_prefix(make_request(range(20))).num_tokens == 0
    assert confirm(kv, request, 4) == 16
    assert not kv.remote_loading.is_remote_loading(request)
    assert kv.find_prefix(make_request(range(20))).num_tokens == 16
    assert kv.block_ids(request.request_id) == table
    request.num_computed_tokens = 16
    assert kv.grow(request, 4) is not None
    request.num_computed_tokens = 20
    kv.commit(request)
    kv.free(request)
    kv.check_integrity()
    assert kv.num_free_blocks == 10


@pytest.mark.parametrize("matched", [0, 1, 3])
def test_what_has_not_arrived_is_given_back(make_kv: MakeKV, make_request: MakeRequest, matched: int) -> None:
    kv = make_kv(10, BLOCK)
    request = make_request(range(20))
    begin(kv, request, 16)
    assert kv.num_free_blocks == 6
    assert confirm(kv, request, matched) == matched * BLOCK
    assert kv.num_free_blocks == 10 - matched
    assert len(kv.cached_hashes(0)) == matched
    kv.check_integrity()


def test_local_prefix_is_kept_though_nothing_has_arrived(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(20, BLOCK, None, 8)
    kv.free(run(kv, range(8)))
    request = make_request(range(40))
    prefix = kv.remote_loading.get_request_prefix_block_number_before_remote_cache_loading(
        request, kv.find_prefix(request)
    )
    assert (prefix.fa_block_num, prefix.swa_block_num) == (2, 2)
    kv.remote_loading.cancel(request)
    begin(kv, request, 36)
    assert confirm(kv, request, 2) == 8
    assert len(held(kv, request, 0)) == len(held(kv, request, 1)) == 2
    request.num_computed_tokens = 8
    assert kv.grow(request, 8) is not None
    kv.check_integrity()


def test_reserved_blocks_stay_and_are_not_findable(make_kv: MakeKV, make_request: MakeRequest) -> None:
    """A last block that is not full comes back with what was swapped out, for the request alone."""
    kv = make_kv(10, BLOCK, None, 6)
    request = make_request(range(16))
    table = begin(kv, request, 15)
    assert [[bool(block_id) for block_id in ids] for ids in table] == [[True] * 4, [False, True, True, True]]
    assert confirm(kv, request, 3, reserved=1) == 12
    assert kv.block_ids(request.request_id) == table
    assert len(kv.cached_hashes(0)) == 3
    request.num_computed_tokens = 15
    assert kv.grow(request, 1) is kv.no_update
    kv.check_integrity()


def test_reserved_blocks_end_where_a_window_has_none(make_kv: MakeKV, make_request: MakeRequest) -> None:
    """A block that cannot be written in every layer is no room."""
    kv = make_kv(20, BLOCK, None, 4)
    request = make_request(range(40))
    begin(kv, request, 36)
    assert confirm(kv, request, 0, reserved=9) == 0
    assert held(kv, request) == []
    assert kv.grow(request, 8) is not None
    kv.check_integrity()


def test_windows_get_blocks_for_the_end_of_a_load_alone(make_kv: MakeKV, make_request: MakeRequest) -> None:
    kv = make_kv(40, BLOCK, None, 4, 12)
    request = make_request(range(100))
    table = begin(kv, request, 80)
    assert [sum(block_id > 0 for block_id in ids) for ids in table] == [20, 1, 3]
    assert kv.remote_loading.remote_swa_blocks(request) == [(1, table[1][19]), *((2, b) for b in table[2][17:])]
    assert confirm(kv, request, 20) == 80
    assert [len(kv.cached_hashes(group)) for group in range(3)] == [20, 1, 3]
    assert kv.find_prefix(make_request(range(100))).num_tokens == 80


def test_end_that_lacks_a_window_block_does_not_count(make_kv: MakeKV, make_request: MakeRequest) -> None:
    """And what has arrived of full attention behind it is worth nothing."""
    kv = make_kv(40, BLOCK, None, 12)
    request = make_request(range(100))
    begin(kv, request, 80)
    assert confirm(kv, request, 20, lacking=1) == 0
    assert kv.num_free_blocks == 40
    assert kv.cached_hashes(1) == set()
    kv.check_integrity()


def test_window_block_that_has_not_arrived_is_not_found_though_the_end_can_do_without(
    make_kv: MakeKV, make_request: MakeRequest
) -> None:
    kv = make_kv(40, BLOCK, None, 5)
    request = make_request(range(21))
    remote = kv.remote_loading
    remote.get_request_prefix_block_number_before_remote_cache_loading(request, kv.find_prefix(request))
    assert remote.allocate_blocks_for_remote_cache(request, 4, 3) is not None  # one more than the end needs
    assert confirm(kv, request, 4, lacking=1) == 16
    assert kv.cached_hashes(1) == set(request.block_hashes[2:4])
    kv.check_integrity()


def test_short_sequence_comes_back_whole(make_kv: MakeKV, make_request: MakeRequest) -> None:
    """Shorter than its window, and all there: nothing is missing for its next token."""
    kv = make_kv(40, BLOCK, None, 40)
    request = make_request(range(11))
    begin(kv, request, 10)
    assert confirm(kv, request, 2, reserved=1) == 8
    assert len(held(kv, request, 1)) == 3


def test_without_room_nothing_changes(make_request: MakeRequest) -> None:
    for blocks, window_blocks in ((3, 9), (9, 2)):
        kv = KVCacheManager(make_kv_config(blocks, BLOCK, (None, 12), num_window_blocks=window_blocks))
        request = make_request(range(20))
        remote = kv.remote_loading
        remote.get_request_prefix_block_number_before_remote_cache_loading(request, kv.find_prefix(request))
        assert remote.allocate_blocks_for_remote_cache(request, 4, 3) is None
        assert kv.num_free_blocks == blocks
        kv.check_integrity()
        remote.cancel(request)
        assert not kv.has_blocks(request.request_id)


def test_request_must_not_go_on_while_it_is_loading(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(20, BLOCK)
    kv.free(run(kv, range(8)))
    request, other = make_request(range(20)), make_request(range(20))
    hit = kv.find_prefix(request)
    remote = kv.remote_loading
    for allocate in (False, True):
        if allocate:
            assert remote.allocate_blocks_for_remote_cache(request, 2, 0) is not None
        else:
            remote.get_request_prefix_block_number_before_remote_cache_loading(request, hit)
        for forbidden in (
            lambda: kv.admit(request, hit, 4),
            lambda: kv.grow(request, 1),
            lambda: kv.commit(request),
            lambda: kv.fork(request, other, 4),
        ):
            with pytest.raises(RemoteLoadingError, match="while its blocks are being loaded"):
                forbidden()
    kv.check_integrity()
    kv.free(request)
    assert kv.num_free_blocks == 20


def test_calls_out_of_order_are_refused(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(20, BLOCK, None, 8)
    running, request = run(kv, range(9)), make_request(range(50, 90))
    remote, hit = kv.remote_loading, kv.find_prefix(make_request([1]))
    with pytest.raises(RemoteLoadingError, match="before a request has blocks"):
        remote.get_request_prefix_block_number_before_remote_cache_loading(running, hit)
    for call in (
        lambda: remote.allocate_blocks_for_remote_cache(request, 2, 2),
        lambda: remote.confirm_remote_cache_loading_result(request, 0, [], 0),
        lambda: remote.cancel(request),
        lambda: remote.cancel(running),
        lambda: remote.set_aside(request),
    ):
        with pytest.raises(RemoteLoadingError, match="is not loading"):
            call()
    remote.get_request_prefix_block_number_before_remote_cache_loading(request, hit)
    with pytest.raises(RemoteLoadingError, match="before a request has blocks"):
        remote.get_request_prefix_block_number_before_remote_cache_loading(request, hit)
    with pytest.raises(RemoteLoadingError, match="no blocks to load"):
        remote.confirm_remote_cache_loading_result(request, 0, [], 0)
    with pytest.raises(RemoteLoadingError, match="5 SWA blocks are not what"):
        remote.allocate_blocks_for_remote_cache(request, 4, 5)
    assert remote.allocate_blocks_for_remote_cache(request, 4, 2) is not None
    with pytest.raises(RemoteLoadingError, match="allocated already"):
        remote.allocate_blocks_for_remote_cache(request, 4, 2)
    for matched, windows in ((5, [0]), (-1, [0]), (4, [2])):
        with pytest.raises(RemoteLoadingError, match="have arrived, of blocks 0 to 4 and 2 SWA blocks"):
            remote.confirm_remote_cache_loading_result(request, matched, windows, 0)
    assert confirm(kv, request, 4) == 16
    with pytest.raises(RemoteLoadingError, match="is not loading"):
        confirm(kv, request, 4)
    kv.check_integrity()


def test_blocks_set_aside_are_used_by_nobody_until_they_are_released(
    make_kv: MakeKV, make_request: MakeRequest
) -> None:
    """A late transfer may still write there, while the request is computed in other blocks."""
    kv = make_kv(10, BLOCK, None, 8)
    request = make_request(range(16))
    table = begin(kv, request, 12)
    name = kv.remote_loading.set_aside(request)
    assert not kv.has_blocks(request.request_id)
    again = kv.admit(request, kv.find_prefix(request), 16)
    assert again is not None
    assert all(not set(old) & set(new) - {0} for old, new in zip(table, again, strict=True))
    assert kv.num_free_blocks == 3
    kv.check_integrity()
    kv.remote_loading.release(name)
    assert kv.num_free_blocks == 6
    kv.check_integrity()


def test_loaded_prefix_without_prefix_caching_is_the_requests_own(make_kv: MakeKV, make_request: MakeRequest) -> None:
    kv = make_kv(10, BLOCK, None, 8, enable_prefix_caching=False)
    request = make_request(range(16))
    begin(kv, request, 14)
    assert confirm(kv, request, 3, reserved=1) == 12
    assert kv.cached_hashes(0) == kv.cached_hashes(1) == set()
    kv.free(request)
    assert kv.num_free_blocks == 10
