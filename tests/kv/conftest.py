"""Short ways to make requests and managers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ksana.kv import KVCacheManager
from ksana.testing.paged_memory import make_kv_config
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams


@pytest.fixture
def make_request() -> Callable[..., Request]:
    counter = itertools.count()

    def make(tokens: Sequence[int], **options: Any) -> Request:
        return Request(f"r{next(counter)}", list(tokens), SamplingParams(), max_total_tokens=10_000, **options)

    return make


@pytest.fixture
def make_kv() -> Callable[..., KVCacheManager]:
    def make(num_blocks: int, block_size: int, *windows: int | None, **options: Any) -> KVCacheManager:
        return KVCacheManager(make_kv_config(num_blocks, block_size, windows or (None,)), **options)

    return make


@pytest.fixture
def run(make_request: Callable[..., Request]) -> Callable[..., Request]:
    """Admit a prompt, compute all of it and commit; the request keeps its blocks."""

    def run_request(kv: KVCacheManager, tokens: Sequence[int], **options: Any) -> Request:
        request = make_request(tokens, **options)
        hit = kv.find_prefix(request)
        assert kv.admit(request, hit, request.num_tokens - hit.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        kv.commit(request)
        return request

    return run_request
