"""The trie drafter: what it counts, what it shares, and what it forgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ksana.drafters.token_trie import TokenTrie
from ksana.drafters.trie import TrieDrafter
from ksana.types.request import Request

MakeRequest = Callable[..., Request]


@given(paths=st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=5)), max_size=20))
def test_a_trie_counts_every_path(paths: list[tuple[str, list[int]]]) -> None:
    trie = TokenTrie()
    expected: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for root, path in paths:
        node = trie.root(root)
        for length, token in enumerate(path, 1):
            node = trie.add(node, token)
            expected[root, tuple(path[:length])] += 1
    for (root, path), count in expected.items():
        node = trie.find(root, list(path[:-1]))
        assert node is not None
        assert trie.count(node, path[-1]) == count
        siblings = [expected[root, (*path[:-1], token)] for token in range(3)]
        likeliest = trie.likeliest(node)
        assert likeliest is not None
        assert trie.count(node, likeliest) == max(siblings)
    assert trie.find("c", []) is None


def drafted(drafter: TrieDrafter, request: Request, limit: int = 16) -> list[int]:
    drafter.start(request)
    draft = drafter.propose(request, limit)
    drafter.finish(request)
    return draft


def learned(drafter: TrieDrafter, request: Request) -> None:
    drafted(drafter, request)


def test_what_one_request_has_generated_is_proposed_to_another(make_request: MakeRequest) -> None:
    drafter = TrieDrafter(10_000)
    learned(drafter, make_request([1], range(100, 130)))
    assert drafted(drafter, make_request([2], [104, 105, 106, 107])) == list(range(108, 120))
    assert drafted(drafter, make_request([2], [9, 105, 106, 107])) == list(range(108, 117))
    assert drafted(drafter, make_request([2], [9, 9, 9, 107])) == [108, 109, 110]
    assert drafted(drafter, make_request([2], [104, 105, 106, 107]), limit=2) == [108, 109]
    assert drafted(drafter, make_request([2], [3])) == []


def test_requests_of_different_salts_learn_nothing_of_each_other(make_request: MakeRequest) -> None:
    drafter = TrieDrafter(10_000)
    learned(drafter, make_request([1], range(100, 130), cache_salt="theirs"))
    assert drafted(drafter, make_request([2], [104, 105, 106, 107], cache_salt="ours")) == []
    assert drafted(drafter, make_request([2], [104, 105, 106, 107])) == []
    assert drafted(drafter, make_request([2], [104, 105], cache_salt="theirs")) == list(range(106, 112))


def test_a_prompt_counts_for_its_own_request_alone_and_for_more(make_request: MakeRequest) -> None:
    drafter = TrieDrafter(10_000)
    for _ in range(3):
        learned(drafter, make_request([1], [5, 6, 7, 8]))
    # Three answers went on with 7, one prompt with 9: 3 x 0.2 against 0.8.
    assert drafted(drafter, make_request([5, 6, 9, 1], [5, 6]))[:1] == [9]
    assert drafted(drafter, make_request([1], [5, 6]))[:1] == [7]
    learned(drafter, make_request([1], [5, 6, 7, 8]))
    learned(drafter, make_request([1], [5, 6, 7, 8]))
    assert drafted(drafter, make_request([5, 6, 9, 1], [5, 6]))[:1] == [7]


def test_the_longest_suffix_that_goes_on_wins(make_request: MakeRequest) -> None:
    drafter = TrieDrafter(10_000)
    for _ in range(9):
        learned(drafter, make_request([1], [30, 50]))
    learned(drafter, make_request([1], [10, 20, 30, 40]))
    assert drafted(drafter, make_request([1], [20, 30]))[:1] == [40]
    assert drafted(drafter, make_request([1], [21, 30]))[:1] == [50]


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_tokens_are_counted_alike_however_they_come(make_request: MakeRequest, piece: int) -> None:
    """Several are accepted at a time, or one."""
    drafter = TrieDrafter(10_000)
    output = [1, 2, 3, 1, 2, 4, 1, 2, 4] * 4
    request = make_request([0], output[:1])
    drafter.start(request)
    for start in range(1, len(output), piece):
        new = output[start : start + piece]
        request.all_token_ids += new
        drafter.update(request, new)
    drafter.finish(request)
    # After "1 2" came 3 four times and 4 eight times.
    assert drafted(drafter, make_request([0], [1, 2]))[:1] == [4]


def test_memory_is_bounded_and_what_is_in_use_stays(make_request: MakeRequest) -> None:
    drafter = TrieDrafter(4000)
    recurring = [1, 2, 3, 4, 5, 6]
    for first in range(100, 20_000, 20):
        learned(drafter, make_request([0], [*recurring, *range(first, first + 20)]))
        assert num_nodes(drafter) <= 4000
        assert drafted(drafter, make_request([0], [9, 2, 3]))[:2] == [4, 5]
    assert drafted(drafter, make_request([0], [100, 101, 102])) == []
    assert drafter._states == {}


def num_nodes(drafter: TrieDrafter) -> int:
    return len(drafter._young) + len(drafter._old)


def test_a_request_goes_on_when_the_generations_change(make_request: MakeRequest) -> None:
    """Its paths end in a trie that is not written to any more."""
    drafter = TrieDrafter(1000)
    request = make_request([0], [1])
    drafter.start(request)
    answer: Sequence[int] = [token % 7 for token in range(1, 500)]
    for token in answer:
        request.all_token_ids.append(token)
        drafter.update(request, [token])
        learned(drafter, make_request([0], [1000 + token, 2000 + token]))
    assert drafter.propose(request, 3) == [(answer[-1] + step) % 7 for step in (1, 2, 3)]
