"""Requests as drafters see them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from ksana.types.request import Request
from ksana.types.sampling import SamplingParams


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request that has generated ``output`` after ``prompt``."""
    numbers = itertools.count()

    def make(prompt: Sequence[int], output: Sequence[int] = (), cache_salt: str = "") -> Request:
        name = f"r{next(numbers)}"
        request = Request(name, list(prompt), SamplingParams(), max_total_tokens=10_000, cache_salt=cache_salt)
        request.all_token_ids += output
        return request

    return make
