"""Which cached prefixes are found, and how long they last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ksana.kv import KVCacheManager
from ksana.types.request import Request

MakeKV = Callable[..., KVCacheManager]
MakeRequest = Callable[..., Request]


def cached_tokens(kv: KVCacheManager, request: Request) -> int:
    return kv.find_prefix(request).num_tokens


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_at_least_one_token_is_left_to_compute(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest, length: int, cached: int
) -> None:
    """Without a token to compute there are no logits to sample from."""
    kv = make_kv(10, 4)
    kv.free(run(kv, range(length)))
    assert cached_tokens(kv, make_request(range(length))) == cached


def test_partly_filled_block_is_not_found(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(10, 4)
    kv.free(run(kv, range(7)))
    assert cached_tokens(kv, make_request(range(20))) == 4


def test_blocks_are_found_only_once_they_are_computed(make_kv: MakeKV, make_request: MakeRequest) -> None:
    kv = make_kv(10, 4)
    request = make_request(range(9))
    kv.admit(request, kv.find_prefix(request), 9)
    assert cached_tokens(kv, make_request(range(9))) == 0
    request.num_computed_tokens = 6
    kv.commit(request)
    assert cached_tokens(kv, make_request(range(9))) == 4


def test_prefix_of_a_running_request_is_shared(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(10, 4)
    first = run(kv, range(9))
    second = run(kv, [*range(8), 99])
    assert kv.block_ids(first.request_id)[0][:2] == kv.block_ids(second.request_id)[0][:2]
    assert kv.num_free_blocks == 10 - 4
    kv.free(first)
    assert kv.num_free_blocks == 10 - 3
    kv.check_integrity()


def test_equal_prompts_computed_at_the_same_time_do_not_own_one_block(
    make_kv: MakeKV, make_request: MakeRequest
) -> None:
    kv = make_kv(10, 4)
    requests = [make_request(range(5)) for _ in range(2)]
    for request in requests:
        kv.admit(request, kv.find_prefix(request), 5)
    for request in requests:
        request.num_computed_tokens = 5
        kv.commit(request)
    assert not set(kv.block_ids("r0")[0]) & set(kv.block_ids("r1")[0])
    for request in requests:
        kv.free(request)
    kv.check_integrity()
    assert cached_tokens(kv, make_request(range(5))) == 4


def test_generated_tokens_are_reused(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    """The next turn of a chat begins with the answer of the last one."""
    kv = make_kv(10, 4)
    request = run(kv, [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        request.all_token_ids.append(token)
        assert kv.grow(request, 1) is not None
        request.num_computed_tokens += 1
        kv.commit(request)
    kv.free(request)
    assert cached_tokens(kv, make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


def test_tail_of_a_chain_is_evicted_before_its_head(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(4, 4)
    kv.free(run(kv, range(16)))
    for evicted in range(1, 5):
        other = make_request([77] * 4 * evicted)
        assert kv.admit(other, kv.find_prefix(other), 4 * evicted) is not None
        assert cached_tokens(kv, make_request([*range(16), 1])) == 16 - 4 * evicted
        kv.free(other)


def test_longest_unused_chain_is_evicted_first(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(4, 4)
    old, new = range(8), range(100, 108)
    kv.free(run(kv, old))
    kv.free(run(kv, new))
    kv.free(run(kv, old))  # used again: now the other one is older
    kv.free(run(kv, [7] * 8))
    assert cached_tokens(kv, make_request([*old, 0])) == 8
    assert cached_tokens(kv, make_request([*new, 0])) == 0


def test_blocks_of_a_hit_are_not_evicted_for_its_own_request(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    """The unused blocks that a hit takes do not count as free ones."""
    kv = make_kv(4, 4)
    kv.free(run(kv, range(12)))
    request = make_request(range(20))
    hit = kv.find_prefix(request)
    assert hit.num_tokens == 12
    assert kv.admit(request, hit, 8) is None
    kv.check_integrity()
    assert kv.num_free_blocks == 4
    assert kv.admit(request, hit, 4) is not None
    kv.check_integrity()
    assert kv.num_free_blocks == 0


def test_salts_do_not_share(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(10, 4)
    kv.free(run(kv, range(9), cache_salt="alice"))
    assert cached_tokens(kv, make_request(range(9))) == 0
    assert cached_tokens(kv, make_request(range(9), cache_salt="bob")) == 0
    assert cached_tokens(kv, make_request(range(9), cache_salt="alice")) == 8


def test_prefix_caching_can_be_switched_off(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    kv = make_kv(10, 4, enable_prefix_caching=False)
    kv.free(run(kv, range(9)))
    assert cached_tokens(kv, make_request(range(9))) == 0
    assert len(kv.cached_hashes(0)) == 0


def test_reset_forgets_everything_and_running_requests_go_on(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(10, 4)
    running = run(kv, range(9))
    assert kv.reset_prefix_cache() == 2
    assert cached_tokens(kv, make_request(range(9))) == 0
    running.all_token_ids += [9, 10, 11, 12]
    assert kv.grow(running, 4) is not None
    running.num_computed_tokens = 13
    kv.commit(running)
    kv.free(running)
    kv.check_integrity()
    assert cached_tokens(kv, make_request(range(14))) == 0  # its first two blocks are not findable any more


def test_lookup_has_no_side_effects(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    """A waiting request is looked up in every step until it fits."""
    kv = make_kv(4, 4)
    kv.free(run(kv, range(9)))
    for _ in range(3):
        assert cached_tokens(kv, make_request(range(9))) == 8
    assert kv.num_free_blocks == 4
    kv.check_integrity()
