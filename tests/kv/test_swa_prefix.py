"""Which prefixes windows can go on from, and what a request holds of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ksana.kv import KVCacheManager
from ksana.testing.paged_memory import make_kv_config
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

MakeKV = Callable[..., KVCacheManager]
MakeRequest = Callable[..., Request]


def cached_tokens(kv: KVCacheManager, request: Request) -> int:
    return kv.find_prefix(request).num_tokens


def forget_window(kv: KVCacheManager, request: Request, indices: list[int], window: int = 0) -> None:
    """Take a window's blocks of a finished request away; the full-attention blocks stay."""
    cache = kv._cache
    for index in indices:
        block = cache.pool.find(request.block_hashes[index])
        assert block is not None
        assert cache.windows[window].forget_content(block.block_id)


def finished(kv: KVCacheManager, run: MakeRequest, num_tokens: int, step: int = 4) -> Request:
    """A request computed ``step`` tokens at a time that is gone; only what stays cached is left of it."""
    request = run(kv, range(step))
    while request.num_tokens < num_tokens:
        request.all_token_ids += range(request.num_tokens, request.num_tokens + step)
        assert kv.grow(request, step) is not None
        request.num_computed_tokens += step
        kv.commit(request)
    kv.free(request)
    return request


@pytest.mark.parametrize(("window", "needed"), [(1, 1), (2, 1), (4, 1), (5, 2), (6, 2), (8, 2), (9, 3), (12, 3)])
@pytest.mark.parametrize("layers", [(), (None,)])
def test_an_end_needs_the_blocks_of_its_last_window(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest, window: int, needed: int, layers: tuple[None, ...]
) -> None:
    """W_blocks = ceil(W / B) of them, with full attention beside it or alone."""
    kv = make_kv(20, 4, *layers, window)
    request = finished(kv, run, 20)
    forget_window(kv, request, list(range(5 - needed)))
    again = make_request([*range(20), 0])
    hit = kv.find_prefix(again)
    assert hit.num_tokens == 20
    table = kv.admit(again, hit, 1)
    assert table is not None
    assert [block_id == 0 for block_id in table[-1]] == [True] * (5 - needed) + [False] * needed + [False]
    kv.free(again)
    forget_window(kv, request, [5 - needed])
    assert cached_tokens(kv, make_request([*range(20), 0])) == 0


def test_prefix_shorter_than_the_window_is_not_usable(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    """The counter has to reach W_blocks, though a short window needs nothing beyond the sequence's start."""
    kv = make_kv(20, 4, None, 12)
    finished(kv, run, 20)
    assert cached_tokens(kv, make_request([*range(8), 99])) == 0
    assert cached_tokens(kv, make_request([*range(12), 99])) == 12


def test_scan_starts_to_count_anew_behind_a_gap(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(20, 4, None, 9)
    request = finished(kv, run, 36)
    forget_window(kv, request, [3, 7])
    assert cached_tokens(kv, make_request([*range(36), 0])) == 7 * 4  # blocks 4, 5, 6; 8 alone is no window
    forget_window(kv, request, [5])
    assert cached_tokens(kv, make_request([*range(36), 0])) == 3 * 4
    forget_window(kv, request, [1])
    assert cached_tokens(kv, make_request([*range(36), 0])) == 0


def test_full_attention_hits_behind_the_end_are_ignored(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    """Their tokens are computed again, in blocks of the request's own."""
    kv = make_kv(20, 4, None, 6)
    request = finished(kv, run, 20)
    forget_window(kv, request, [4])
    again = make_request([*range(20), 0])
    hit = kv.find_prefix(again)
    assert hit.num_tokens == 16
    found = kv._cache.pool.find(request.block_hashes[4])
    table = kv.admit(again, hit, 5)
    assert found is not None
    assert table is not None
    assert found.block_id not in table[0]
    kv.check_integrity()


def test_an_end_is_one_for_every_window(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(60, 4, None, 4, 9)
    request = finished(kv, run, 32)
    forget_window(kv, request, [7], window=0)
    forget_window(kv, request, [4], window=1)  # no end at 5, 6, 7
    assert cached_tokens(kv, make_request([*range(32), 0])) == 16


def test_evicted_full_attention_block_takes_its_window_blocks_along(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(5, 4, None, 6)
    finished(kv, run, 20)
    assert len(kv.cached_hashes(0)) == len(kv.cached_hashes(1)) == 5
    other = make_request([77] * 8)
    assert kv.admit(other, kv.find_prefix(other), 8) is not None
    assert len(kv.cached_hashes(0)) == len(kv.cached_hashes(1)) == 3
    kv.check_integrity()


def test_window_block_is_evicted_alone(make_request: MakeRequest, run: MakeRequest) -> None:
    """Its full-attention block stays, and is no part of an end any more."""
    kv = KVCacheManager(make_kv_config(20, 4, (None, 4), num_window_blocks=4))
    finished(kv, run, 16)
    assert len(kv.cached_hashes(1)) == 4
    other = make_request([77] * 4)
    assert kv.admit(other, kv.find_prefix(other), 4) is not None
    assert len(kv.cached_hashes(0)) == 4
    assert len(kv.cached_hashes(1)) == 3, "the first block of equal hits, which spares least"
    assert cached_tokens(kv, make_request([*range(4), 0])) == 0
    assert cached_tokens(kv, make_request([*range(16), 0])) == 16


def test_content_computed_again_is_found_with_its_windows(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    """Else a prefix whose windows are gone would be useless for as long as its full-attention blocks live."""
    kv = make_kv(20, 4, None, 6)
    request = finished(kv, run, 20)
    forget_window(kv, request, [3, 4])
    assert cached_tokens(kv, make_request([*range(20), 0])) == 12
    kv.free(run(kv, [*range(20), 0]))
    kv.check_integrity()
    assert cached_tokens(kv, make_request([*range(20), 0])) == 20
    assert len(kv.cached_hashes(0)) == 5


def test_taken_prefix_is_neither_evicted_nor_worth_as_little_as_before(
    make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = KVCacheManager(make_kv_config(40, 4, (None, 8), num_window_blocks=6))
    finished(kv, run, 16)
    again = make_request([*range(16), 1])
    assert kv.admit(again, kv.find_prefix(again), 1) is not None
    swa = kv._cache.windows[0]
    assert swa.num_free_blocks == 6 - 3
    other = make_request([77] * 12)
    assert kv.admit(other, kv.find_prefix(other), 12) is not None
    assert cached_tokens(kv, make_request([*range(16), 2])) == 16
    kv.free(again)
    kv.free(other)
    last = make_request([66] * 16)  # four blocks: two were hit, and are the last to go
    assert kv.admit(last, kv.find_prefix(last), 16) is not None
    assert cached_tokens(kv, make_request([*range(16), 2])) == 16


def test_window_blocks_of_a_hit_are_not_evicted_for_its_own_request(
    make_request: MakeRequest, run: MakeRequest
) -> None:
    """Those that nobody uses are taken over, and do not count as free ones."""
    kv = KVCacheManager(make_kv_config(20, 4, (None, 8), num_window_blocks=3))
    finished(kv, run, 12)
    request = make_request(range(20))
    hit = kv.find_prefix(request)
    assert hit.num_tokens == 12
    assert kv.admit(request, hit, 8) is None
    kv.check_integrity()
    assert kv.admit(request, hit, 4) is not None
    kv.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13])
def test_request_holds_a_window_and_a_block_more_between_steps(
    make_kv: MakeKV, run: MakeRequest, window: int, caching: bool
) -> None:
    """They are given back when a step is committed, and not only when the next one wants blocks."""
    kv = make_kv(60, 4, None, window, enable_prefix_caching=caching)
    for chunk in (1, 3, 4, 11):
        request = run(kv, range(5))
        while request.num_tokens < 60:
            request.all_token_ids += [0] * chunk
            assert kv.grow(request, chunk) is not None
            request.num_computed_tokens += chunk
            kv.commit(request)
            held = [block_id for block_id in kv.block_ids(request.request_id)[1] if block_id]
            assert len(held) <= -(-window // 4) + 1
        kv.free(request)
    kv.check_integrity()


def test_dropped_blocks_stay_cached_until_their_place_is_needed(make_kv: MakeKV, run: MakeRequest) -> None:
    kv = make_kv(60, 4, None, 4)
    request = finished(kv, run, 40)
    assert len(kv.cached_hashes(1)) == 10
    assert set(request.block_hashes) == kv.cached_hashes(1)
    uncached = make_kv(60, 4, None, 4, enable_prefix_caching=False)
    finished(uncached, run, 40)
    assert uncached._cache.windows[0].num_free_cached_blocks == 0


def test_windows_of_what_is_loaded_are_those_of_its_end(make_kv: MakeKV, make_request: MakeRequest) -> None:
    """Tokens that come from elsewhere in the step need no blocks in windows that have passed them."""
    kv = make_kv(60, 4, None, 8)
    request = make_request(range(200))
    table = kv.admit(request, kv.find_prefix(request), 180, num_external_tokens=160)
    assert table is not None
    assert [index for index, block_id in enumerate(table[1]) if block_id] == list(range(38, 45))
    request.num_computed_tokens = 180
    kv.commit(request)
    assert len(kv.cached_hashes(0)) == 45
    assert len(kv.cached_hashes(1)) == 7
    assert cached_tokens(kv, make_request([*range(180), 0])) == 180
    kv.check_integrity()


def test_five_windows_for_one_full_layer_save_most_of_the_memory() -> None:
    """The shape of Gemma 3: beyond a few windows' length, a request's memory grows by its full layers alone."""
    config = make_kv_config(4096, 16, (None, 512), num_window_blocks=4096)
    kv = KVCacheManager(config)
    request = Request("r", [1] * 32_768, SamplingParams(), max_total_tokens=40_000)
    chunk = 1024
    hit = kv.find_prefix(request)
    assert kv.admit(request, hit, chunk) is not None
    while request.num_computed_tokens < request.num_tokens:
        request.num_computed_tokens += chunk
        kv.commit(request)
        assert kv.grow(request, chunk) is not None
    full, window = ([b for b in table if b] for table in kv.block_ids(request.request_id))
    kv_layers = len(full) + 5 * len(window)
    assert len(full) == 2048 + 64
    assert len(window) == 32 + 64, "the window, and the chunk that is about to be computed"
    assert kv_layers < 0.22 * 6 * len(full)
