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
    assert kv.pool.num_cached_blocks == 0


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


def forget_blocks(kv: KVCacheManager, request: Request, group: int, indices: list[int]) -> None:
    """Evict some of the blocks that a finished request has left."""
    for index in indices:
        block = kv.pool.find((request.block_hashes[index], group))
        assert block is not None
        kv.pool._evict(block)


@pytest.mark.parametrize(
    ("window", "needed"),
    [(2, 1), (4, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)],
)
def test_window_needs_exactly_the_blocks_that_the_next_token_looks_at(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest, window: int, needed: int
) -> None:
    """The next token is in its own window, so a window of w needs w - 1 cached tokens before it."""
    kv = make_kv(20, 4, window)
    request = run(kv, range(20))
    kv.free(request)
    forget_blocks(kv, request, 0, list(range(5 - needed)))
    hit = kv.find_prefix(make_request([*range(20), 0]))
    assert hit.num_tokens == 20
    assert [block.block_id == 0 for block in hit.blocks[0]] == [True] * (5 - needed) + [False] * needed
    forget_blocks(kv, request, 0, [5 - needed])
    assert cached_tokens(kv, make_request([*range(20), 0])) == 0


def test_window_hit_from_the_start_may_be_shorter_than_the_window(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(20, 4, 100)
    kv.free(run(kv, range(13)))
    assert cached_tokens(kv, make_request([*range(12), 99, 99])) == 12


def test_window_hit_uses_an_earlier_run_when_the_last_one_is_broken(
    make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest
) -> None:
    kv = make_kv(20, 4, 9)
    request = run(kv, range(28))
    kv.free(request)
    forget_blocks(kv, request, 0, [0, 5])
    hit = kv.find_prefix(make_request([*range(28), 0]))
    assert hit.num_tokens == 20
    assert [block.block_id == 0 for block in hit.blocks[0]] == [True, True, True, False, False]


def test_window_of_one_token_needs_nothing_cached(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    """An older block that happens to be cached must not shorten the hit."""
    kv = make_kv(20, 4, 1)
    assert cached_tokens(kv, make_request(range(25))) == 24
    kv.free(run(kv, range(20)))
    assert cached_tokens(kv, make_request(range(25))) == 24


def test_hybrid_hit_is_one_that_all_groups_have(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    """A shorter answer of one group makes the others look again, until all agree."""
    kv = make_kv(60, 4, None, 5, 9)
    request = run(kv, range(32))
    kv.free(request)
    forget_blocks(kv, request, 0, [7])  # full: at most 7 blocks
    forget_blocks(kv, request, 1, [6, 4])  # window 5, one block: an end at 6, 4, ...
    forget_blocks(kv, request, 2, [5])  # window 9, two blocks: not 6 or 7, but 5 and less
    hit = kv.find_prefix(make_request([*range(32), 0]))
    assert hit.num_tokens == 16
    assert [[block.block_id == 0 for block in blocks] for blocks in hit.blocks] == [
        [False] * 4,
        [True] * 3 + [False],
        [True] * 2 + [False] * 2,
    ]


def test_hybrid_groups_have_blocks_of_their_own(make_kv: MakeKV, run: MakeRequest) -> None:
    kv = make_kv(10, 4, None, 100)
    request = run(kv, range(8))
    full, sliding = kv.block_ids(request.request_id)
    assert not set(full) & set(sliding)
    assert kv.num_free_blocks == 6


def test_lookup_has_no_side_effects(make_kv: MakeKV, make_request: MakeRequest, run: MakeRequest) -> None:
    """A waiting request is looked up in every step until it fits."""
    kv = make_kv(4, 4)
    kv.free(run(kv, range(9)))
    for _ in range(3):
        assert cached_tokens(kv, make_request(range(9))) == 8
    assert kv.num_free_blocks == 4
    kv.check_integrity()
