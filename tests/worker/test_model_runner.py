"""Steps of a real, small model: whatever is batched, cut, cached or preempted, each request computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ksana.types.request import InputEmbedding, Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import NewRequestData, SchedulerOutput

MakeEngine = Callable[..., Any]

WINDOWS = [(None, None), (6, 6), (None, 6), (5, None, 9)]


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, 3 + 7 * i % 30).tolist() for i in range(count)]


def alone(make_engine: MakeEngine, prompt: list[int], windows: tuple[int | None, ...], **request: Any) -> Any:
    """(tokens, logits) of a request that has an engine to itself."""
    engine = make_engine(windows=windows, num_blocks=200)
    result = engine.add(prompt, **request)
    engine.run()
    return result.output_token_ids, np.stack(engine.logits[result.request_id])


def assert_same(engine: Any, request: Request, expected: Any) -> None:
    tokens, logits = expected
    np.testing.assert_allclose(np.stack(engine.logits[request.request_id]), logits, atol=1e-4, rtol=0)
    assert request.output_token_ids == tokens


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_batches_equal_single_requests(
    make_engine: MakeEngine, windows: tuple[int | None, ...], chunk: int, block_size: int
) -> None:
    engine = make_engine(windows=windows, num_blocks=400, block_size=block_size, split_fuse_token_num=chunk)
    requests = []
    for prompt in prompts(6):
        requests.append(engine.add(prompt, max_tokens=6))
        engine.step()  # each joins while those before it are on their way
    engine.run()
    for request, prompt in zip(requests, prompts(6), strict=True):
        assert_same(engine, request, alone(make_engine, prompt, windows, max_tokens=6))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(None, None), (None, 6)])
def test_preempted_requests_equal_single_ones(
    make_engine: MakeEngine, windows: tuple[int | None, ...], caching: bool
) -> None:
    num_blocks = 12 * len(set(windows))
    engine = make_engine(windows=windows, num_blocks=num_blocks, caching=caching, split_fuse_token_num=5)
    requests = [engine.add(prompt, max_tokens=14) for prompt in prompts(6)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request, prompt in zip(requests, prompts(6), strict=True):
        assert_same(engine, request, alone(make_engine, prompt, windows, max_tokens=14))


@pytest.mark.parametrize("windows", WINDOWS)
def test_cached_prefixes_equal_computed_ones(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    """A second time, a longer one, one that leaves the first in the middle, and the first turn of a chat again."""
    base = prompts(5)[4]
    engine = make_engine(windows=windows, num_blocks=200)
    first = engine.add(base)
    engine.run()
    variants = [base, [*base, 1, 2, 3], [*base[:17], 63, 62, 61], [*base, *first.output_token_ids, 5]]
    requests = [engine.add(variant) for variant in variants]
    engine.run()
    assert all(request.num_cached_tokens > 0 for request in requests)
    for request, variant in zip(requests, variants, strict=True):
        assert_same(engine, request, alone(make_engine, variant, windows))


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_embeddings_replace_tokens_also_across_chunks(make_engine: MakeEngine, chunk: int) -> None:
    """Rows that are the embeddings of some tokens do what those tokens do, whatever tokens they stand on."""
    prompt = prompts(3)[2]
    engine = make_engine(split_fuse_token_num=chunk)
    table = engine.weights["model.embed_tokens.weight"].numpy()
    embeddings = (InputEmbedding(2, table[prompt[2:9]]), InputEmbedding(11, table[prompt[11:13]]))
    masked = [0 if 2 <= i < 9 or 11 <= i < 13 else token for i, token in enumerate(prompt)]
    neighbour = engine.add(prompts(4)[3])
    engine.step()
    request = engine.add(masked, embeddings=embeddings)
    engine.run()
    assert_same(engine, request, alone(make_engine, prompt, (None, None)))
    assert_same(engine, neighbour, alone(make_engine, prompts(4)[3], (None, None)))


def test_embeddings_of_another_dtype_are_taken(make_engine: MakeEngine) -> None:
    prompt = prompts(3)[2]
    engine = make_engine()
    table = engine.weights["model.embed_tokens.weight"].numpy()
    request = engine.add([0] * len(prompt), embeddings=(InputEmbedding(0, table[prompt].astype(np.float64)),))
    engine.run()
    assert_same(engine, request, alone(make_engine, prompt, (None, None)))


def test_equal_tokens_under_different_embeddings_share_no_cache(make_engine: MakeEngine) -> None:
    prompt = prompts(5)[4]
    engine = make_engine()
    table = engine.weights["model.embed_tokens.weight"].numpy()
    results = []
    for shift in (0, 1):
        rows = table[[(token + shift) % 64 for token in prompt]]
        request = engine.add([0] * len(prompt), embeddings=(InputEmbedding(0, rows),))
        engine.run()
        assert request.num_cached_tokens == 0
        results.append(engine.logits[request.request_id][0])
    assert not np.allclose(results[0], results[1], atol=1e-2)


def test_broken_request_is_named_and_its_neighbours_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    healthy = engine.add(prompts(1)[0])
    broken = engine.add([1, 2, 3], embeddings=(InputEmbedding(1, np.full((1, 32), np.nan, dtype=np.float32)),))
    output = engine.step()
    assert output.broken_request_ids == [broken.request_id]
    assert list(output.sampled_token_ids) == [healthy.request_id]
    engine.scheduler.abort(broken.request_id)
    engine.run()
    assert healthy.output_token_ids == alone(make_engine, prompts(1)[0], (None, None))[0]


def test_blocks_of_a_broken_request_poison_nobody(make_engine: MakeEngine) -> None:
    """Its NaN stay in the blocks until others have written over them."""
    engine = make_engine(num_blocks=14, windows=(None, 6))
    rows = np.full((19, 32), np.nan, dtype=np.float32)
    broken = engine.add([1] * 19, embeddings=(InputEmbedding(0, rows),))
    assert engine.step().broken_request_ids == [broken.request_id]
    engine.scheduler.abort(broken.request_id)
    for prompt in prompts(2):
        request = engine.add(prompt)
        engine.run()
        assert_same(engine, request, alone(make_engine, prompt, (None, 6)))


def test_forked_requests_write_into_blocks_of_their_own(make_engine: MakeEngine) -> None:
    """Copies come before the step writes: both go on from the same 6 tokens, with different ones."""
    engine = make_engine(windows=(None, 6))
    prompt, kv = [3, 1, 4, 1, 5, 9], engine.kv
    parent = Request("parent", prompt, SamplingParams(temperature=0.0), max_total_tokens=20)
    tables = kv.admit(parent, kv.find_prefix(parent), 6)
    first = SchedulerOutput({"parent": 6}, [describe(parent, tables)])
    [token] = engine.runner.execute(first).sampled_token_ids["parent"]
    parent.num_computed_tokens = 6
    parent.all_token_ids.append(token)
    child = Request("child", [*prompt, 8], parent.sampling, max_total_tokens=20)
    child.num_computed_tokens = 6
    second = SchedulerOutput({"parent": 1, "child": 1}, [describe(child, kv.fork(parent, child, 6))])
    for request in (parent, child):
        second.block_table_updates[request.request_id] = kv.grow(request, 1)
    second.block_copies = kv.take_block_copies()
    assert len(second.block_copies) == 2, "one a group"
    engine.runner.execute(second)
    logits = engine.model.logits.numpy()
    for row, tokens in enumerate(([*prompt, token], [*prompt, 8])):
        np.testing.assert_allclose(logits[row], alone(make_engine, tokens, (None, 6))[1][0], atol=1e-4)


def describe(request: Request, tables: tuple[list[int], ...]) -> NewRequestData:
    return NewRequestData(
        request.request_id,
        list(request.all_token_ids),
        request.num_computed_tokens,
        tables,
        request.sampling,
        request.seed,
        request.num_prompt_tokens,
    )


def test_runner_forgets_all_requests_on_reset(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompts(1)[0])
    engine.step()
    engine.runner.reset()
    for request in engine.scheduler.running():
        engine.scheduler.abort(request.request_id)
    again = engine.add(prompts(2)[1])
    engine.run()
    assert_same(engine, again, alone(make_engine, prompts(2)[1], (None, None)))


def test_step_without_tokens_only_drops_rows(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add(prompts(1)[0])
    engine.step()
    engine.scheduler.abort(request.request_id)
    assert engine.step().sampled_token_ids == {}
    assert not engine.scheduler.has_work()
