"""The native API on a real engine with a tiny random model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.tiny_models import tiny_model
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, SchedulerConfig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder: Path = tiny_model(tmp_path_factory.mktemp("model"))
    config = KsanaConfig(
        model=ModelOptions(model=str(folder), served_model_name="tiny"),
        scheduler=SchedulerConfig(max_num_seqs=4, split_fuse_token_num=16),
        cache=CacheConfig(num_blocks=128),
        kernel=KernelConfig(threads=1),
    )
    engine = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    yield engine
    asyncio.run(engine.stop("the tests are done"))


def body(prompt: str, max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"prompt": prompt, "sampling_config": {"max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}}


async def whole(session: aiohttp.ClientSession, request: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/generate", json={**request, "stream": False}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def test_streamed_and_whole_answers_agree(serving, real_engine: AsyncEngine) -> None:
    async with serving(real_engine) as session:
        request = body("The quick brown fox", 40)
        expected = await whole(session, request)
        async with session.post("/generate", json=request) as response:
            last = json.loads((await response.read()).split(b"\0")[-2])
    assert last == expected
    assert len(expected["output_token_ids"][0]) == 40
    assert expected["finish_reasons"] == ["length"]


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(serving, real_engine: AsyncEngine) -> None:
    """vllm#10806, sglang#36876, sglang#28341: more requests than seats, so that every phase is hit."""
    moments = random.Random(0)
    free = real_engine.num_free_blocks

    async def read(session: aiohttp.ClientSession, number: int) -> None:
        request = {**body(f"{number} " + "word " * moments.randrange(60), 60), "stream": number % 2 == 0}
        async with session.post("/generate", json=request) as response:
            await response.read()

    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(session, number), moments.uniform(0, 0.3))

    async with serving(real_engine) as session:
        await asyncio.gather(*(leave(session, number) for number in range(60)))
        while real_engine.num_unfinished():
            await asyncio.sleep(0.01)
        assert await whole(session, body("hello", 3))
    while real_engine.num_free_blocks != free:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("request_body", "status", "code", "param"),
    [
        ({"prompt": ""}, 400, None, "prompt"),
        ({"input_tokens": []}, 400, None, "input_tokens"),
        ({"input_tokens": [-1]}, 400, None, "input_tokens"),
        ({"input_tokens": [512]}, 400, None, "input_tokens"),
        ({"input_tokens": [2**63]}, 400, None, "input_tokens"),
        ({"input_tokens": [5] * 512}, 400, "context_length_exceeded", "input_tokens"),
        ({"prompt": "a", "sampling_config": {"stop_token_ids": [512]}}, 400, None, "sampling_config.stop_token_ids"),
        ({"prompt": "a", "pos": [300], "embeddings": [[0.5] * 64]}, 400, None, "input_refit_embedding"),
        ({"messages": [{"role": "user"}]}, 400, None, "messages"),
    ],
)
async def test_admission_names_the_field_of_this_api(
    serving, real_engine: AsyncEngine, request_body: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    async with serving(real_engine) as session:
        async with session.post("/generate", json=request_body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (status, code, param)
        assert await whole(session, body("hello", 3))


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("json_schema", '{"type": "strin"}', "sampling_config.json_schema"),
        ("json_schema", "[" * 50_000, "sampling_config.json_schema"),
        ("json_schema", {"type": "integer", "multipleOf": 99999989}, "sampling_config.json_schema"),
        ("structured_output_regex", "((a{1000}){1000})", "structured_output_regex"),
    ],
)
async def test_impossible_structures_are_refused_before_a_stream_begins(
    serving, real_engine: AsyncEngine, field: str, value: Any, param: str
) -> None:
    request: dict[str, Any] = {"prompt": "The fox", "sampling_config": {"max_new_tokens": 5}}
    (request if field.startswith("structured") else request["sampling_config"])[field] = value
    async with serving(real_engine) as session:
        async with session.post("/generate", json=request) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
        assert (await whole(session, body("The fox", 3)))["finish_reasons"] == ["length"]


async def test_cached_prefixes_can_be_forgotten(serving, real_engine: AsyncEngine) -> None:
    async with serving(real_engine) as session:
        await whole(session, body("x" * 100, 2))
        async with session.post("/reset_prefix_cache") as response:
            assert response.status == 200
            assert (await response.json())["num_blocks"] > 0
        async with session.post("/reset_prefix_cache") as response:
            assert await response.json() == {"num_blocks": 0}
