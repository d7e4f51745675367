"""Several engine requests behind one HTTP call live and die together."""

from __future__ import annotations

import asyncio

import pytest

from ksana.errors import RequestError
from ksana.server.generation import Generation
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


def drafts(*max_tokens: int) -> list[RequestDraft]:
    return [RequestDraft(prompt="hi", sampling=SamplingParams(max_tokens=n)) for n in max_tokens]


async def test_results_come_in_the_order_of_the_drafts(engine: ScriptedEngine) -> None:
    async with Generation(engine, drafts(9, 2, 5)) as generation:
        assert [output.text for output in await generation.results()] == ["Hello, wo", "He", "Hello"]


async def test_deltas_of_all_streams_interleave_and_lose_nothing(engine: ScriptedEngine) -> None:
    texts = ["", "", ""]
    async with Generation(engine, drafts(9, 2, 5)) as generation:
        await generation.wait_for_first()
        async for index, output in generation:
            texts[index] += output.text_delta
    assert texts == ["Hello, wo", "He", "Hello"]


async def test_a_refused_draft_takes_the_accepted_ones_along(engine: ScriptedEngine) -> None:
    with pytest.raises(RequestError, match="empty"):
        async with Generation(engine, [*drafts(9), RequestDraft(prompt="")]):
            pass
    assert engine.aborted == ["r0"]


async def test_one_failure_aborts_the_others(engine: ScriptedEngine) -> None:
    engine.fail_after = 2
    with pytest.raises(RequestError, match="scripted failure"):
        async with Generation(engine, drafts(1, 9, 9)) as generation:
            await generation.results()
    assert engine.num_unfinished() == 0


async def test_cancellation_leaves_no_task_and_no_request(engine: ScriptedEngine) -> None:
    engine.held = True

    async def run() -> None:
        async with Generation(engine, drafts(9, 9)) as generation:
            await generation.results()

    before = asyncio.all_tasks()
    task = asyncio.create_task(run())
    while engine.num_unfinished() < 2:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert asyncio.all_tasks() == before
    assert sorted(engine.aborted) == ["r0", "r1"]
