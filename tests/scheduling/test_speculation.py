"""How many tokens are drafted for whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ksana.scheduling.speculation import Speculator, draft_length
from ksana.types.config import SpeculationConfig
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams


class EndlessDrafter:
    """Always has as many tokens as are wanted."""

    def __init__(self) -> None:
        self.requests: set[str] = set()

    def start(self, request: Request) -> None:
        assert request.request_id not in self.requests
        self.requests.add(request.request_id)

    def propose(self, request: Request, limit: int) -> list[int]:
        assert request.request_id in self.requests
        return [0] * limit

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        assert request.request_id in self.requests

    def finish(self, request: Request) -> None:
        self.requests.remove(request.request_id)


@pytest.fixture
def make_speculator() -> Callable[..., tuple[Speculator, Request]]:
    """A speculator that knows a request which has generated a token."""
    numbers = itertools.count()

    def make(**config: Any) -> tuple[Speculator, Request]:
        speculator = Speculator(EndlessDrafter(), SpeculationConfig(method="endless", **config))
        request = Request(f"r{next(numbers)}", [1], SamplingParams(), max_total_tokens=100)
        speculator.update(request, [2])
        return speculator, request

    return make


@given(
    chance=st.floats(0, 1),
    num_requests=st.integers(1, 64),
    step_overhead=st.floats(0.5, 100),
    limit=st.integers(0, 24),
)
def test_the_length_is_the_one_of_most_tokens_a_second(
    chance: float, num_requests: int, step_overhead: float, limit: int
) -> None:
    def speed(length: int) -> float:
        tokens = num_requests * sum(chance**i for i in range(length + 1))
        return tokens / (step_overhead + num_requests * (1 + length))

    chosen = draft_length(chance, num_requests, step_overhead, limit)
    assert 0 <= chosen <= limit
    assert speed(chosen) >= max(speed(length) for length in range(limit + 1)) * (1 - 1e-9)


def lengths(speculator: Speculator, request: Request, num_accepted: int, steps: int, **step: int) -> list[int]:
    """Of the drafts of some steps, of each of which up to ``num_accepted`` tokens are accepted."""
    drafted = []
    for _ in range(steps):
        draft = speculator.propose(request, **{"num_requests": 1, "limit": 100, **step})
        if draft:
            speculator.observe(request, len(draft), min(num_accepted, len(draft)))
        speculator.update(request, [0])
        drafted.append(len(draft))
    return drafted


def test_accepted_drafts_make_the_next_ones_longer(make_speculator: Callable[..., Any]) -> None:
    found = lengths(*make_speculator(), num_accepted=100, steps=6)
    assert found == sorted(found)
    assert found[0] < found[-1] == 12


def test_rejected_drafts_end_for_a_while_and_are_tried_again(make_speculator: Callable[..., Any]) -> None:
    found = lengths(*make_speculator(), num_accepted=0, steps=200)
    assert found[:50].index(0) < 12
    runs = [(length > 0, len(list(group))) for length, group in itertools.groupby(found, bool)]
    assert [drafting for drafting, _ in runs[:4]] == [True, False, True, False]
    assert runs[1][1] == 32
    assert sum(found) < 0.35 * len(found)


def test_a_request_that_is_accepted_half_of_the_time_goes_on(make_speculator: Callable[..., Any]) -> None:
    assert 0 not in lengths(*make_speculator(), num_accepted=1, steps=100)


def test_in_a_large_batch_only_what_is_nearly_certain_is_drafted(make_speculator: Callable[..., Any]) -> None:
    assert set(lengths(*make_speculator(), num_accepted=100, steps=100, num_requests=24)) == {0}
    speculator, request = make_speculator()
    lengths(speculator, request, num_accepted=100, steps=10)
    assert lengths(speculator, request, num_accepted=100, steps=1, num_requests=24)[0] > 0
    assert lengths(speculator, request, num_accepted=100, steps=1, num_requests=33) == [0]
    # That was no fault of the drafts: as soon as the batch is small again, they go on.
    assert lengths(speculator, request, num_accepted=100, steps=1) == [12]


def test_waiting_for_a_token_is_worth_it_exactly_if_there_would_be_a_draft(make_speculator: Callable[..., Any]) -> None:
    speculator, request = make_speculator()
    for num_accepted, num_requests in itertools.product((0, 0, 0, 9, 0, 9, 9), (1, 8, 1, 20, 40)):
        for _ in range(5):
            expected = speculator.may_propose(request, num_requests)
            draft = speculator.propose(request, num_requests, limit=50)
            assert bool(draft) == expected
            if draft:
                speculator.observe(request, len(draft), min(num_accepted, len(draft)))
            speculator.update(request, [0])


def test_a_limit_of_the_request_is_no_reason_to_pause(make_speculator: Callable[..., Any]) -> None:
    speculator, request = make_speculator()
    speculator.observe(request, 1, 0)
    assert speculator.propose(request, num_requests=1, limit=0) == []
    assert speculator.propose(request, num_requests=1, limit=1) == [0]


def test_requests_are_forgotten_however_far_they_came(make_speculator: Callable[..., Any]) -> None:
    speculator, request = make_speculator()
    never_ran = Request("never", [1], SamplingParams(), max_total_tokens=100)
    speculator.finish(never_ran)
    assert speculator.propose(never_ran, 1, 5) == []
    speculator.finish(request)
    assert speculator._paces == {}
    assert speculator._drafter.requests == set()
    assert speculator.propose(request, 1, 5) == []
    assert speculator.observe(request, 3, 1) == 2
