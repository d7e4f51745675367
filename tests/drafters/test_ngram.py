"""The n-gram drafter and its index, against a plain search through all of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from ksana.drafters.ngram import NgramDrafter
from ksana.drafters.suffix_index import SuffixIndex
from ksana.types.request import Request

MakeRequest = Callable[..., Request]

FEW_TOKENS = st.lists(st.integers(0, 2), max_size=24)


def match_length(tokens: list[int], end: int, context: list[int], limit: int) -> int:
    length = 0
    while length < min(limit, end, len(context)) and tokens[end - length - 1] == context[-length - 1]:
        length += 1
    return length


def searched(tokens: list[int], context: list[int], n: int, limit: int) -> list[tuple[int, int]]:
    """All places, found by looking at each."""
    found = [(end, match_length(tokens, end, context, limit)) for end in range(len(tokens) - 1, 0, -1)]
    return [(end, length) for end, length in found if length >= n]


@given(tokens=FEW_TOKENS, more=FEW_TOKENS, context=FEW_TOKENS, n=st.integers(1, 3), extra=st.integers(0, 3))
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], more: list[int], context: list[int], n: int, extra: int
) -> None:
    """Also in what came later, and where an n-gram overlaps itself."""
    index = SuffixIndex(tokens, n)
    for token in more:
        tokens.append(token)
        index.extend()
    assert list(index.occurrences(context, n + extra)) == searched(tokens, context, n, n + extra)[:32]
    assert list(index.occurrences(tokens, n + extra)) == searched(tokens, tokens, n, n + extra)[:32]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12), output=FEW_TOKENS, limit=st.integers(1, 8))
def test_the_longest_and_latest_match_is_copied(
    make_request: MakeRequest, prompt: list[int], output: list[int], limit: int
) -> None:
    drafter = NgramDrafter(min_ngram=2, max_ngram=4)
    request = make_request(prompt)
    drafter.start(request)
    for token in output:
        request.all_token_ids.append(token)
        drafter.update(request, [token])
    tokens = request.all_token_ids
    found = searched(tokens, tokens, 2, 4)
    draft = drafter.propose(request, limit)
    if not found:
        assert draft == []
        return
    end, _ = max(found, key=lambda place: place[1])  # of equals the first, which is the latest
    continued = list(tokens)
    for position in range(limit):
        continued.append(continued[end + position])
    assert draft == continued[len(tokens) :]
    assert tokens == request.all_token_ids


def test_a_period_goes_on_beyond_the_end(make_request: MakeRequest) -> None:
    request = make_request([7, 1, 2, 3], [1, 2, 3])
    drafter = NgramDrafter(min_ngram=2, max_ngram=3)
    drafter.start(request)
    assert drafter.propose(request, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_finished_request_leaves_nothing(make_request: MakeRequest) -> None:
    drafter = NgramDrafter(min_ngram=2, max_ngram=3)
    request = make_request([1, 2, 3])
    drafter.start(request)
    drafter.finish(request)
    with pytest.raises(KeyError):
        drafter.propose(request, 1)
