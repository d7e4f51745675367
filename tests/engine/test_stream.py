"""The consumer's end of a request, without an engine behind it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from ksana.engine.output_processor import OutputDelta
from ksana.engine.stream import RequestStream
from ksana.errors import EngineDeadError, RequestError
from ksana.types.output import FinishReason, RequestStats
from ksana.types.request import Request, RequestDraft
from ksana.types.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_stream(aborted: list[str] | None = None) -> RequestStream:
    nothing: Any = None
    request = Request("r", [1, 2], SamplingParams(), max_total_tokens=10)
    abort = (aborted if aborted is not None else []).append
    return RequestStream(request, RequestDraft(prompt="x"), nothing, nothing, abort)


def end(text: str = "") -> OutputDelta:
    return OutputDelta("r", text, finish_reason=FinishReason.ABORT, stats=RequestStats(num_output_tokens=2))


async def test_news_that_wait_are_merged_and_none_is_lost() -> None:
    stream = make_stream()
    for text, token in (("a", 7), ("b", 8)):
        stream.push(OutputDelta("r", text, [token]))
    first = await stream.__anext__()
    assert (first.text_delta, first.token_ids_delta, first.finished) == ("ab", [7, 8], False)
    stream.push(OutputDelta("r", "c", [9]))
    stream.push(end("d"))
    last = await stream.__anext__()
    assert (last.text_delta, last.text, last.token_ids, last.finished) == ("cd", "abcd", [7, 8, 9], True)
    assert last.stats.num_output_tokens == 2
    assert [output async for output in stream] == []


async def test_what_the_consumer_has_does_not_change_under_it() -> None:
    stream = make_stream()
    stream.push(OutputDelta("r", "a", [7]))
    first = await stream.__anext__()
    stream.push(OutputDelta("r", "b", [8]))
    stream.push(end())
    await stream.__anext__()
    assert (first.text_delta, first.token_ids_delta, first.text) == ("a", [7], "a")


async def test_a_consumer_that_gave_up_waiting_misses_nothing() -> None:
    stream = make_stream()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.__anext__(), 0.01)
    stream.push(OutputDelta("r", "a", [7]))
    assert (await stream.__anext__()).text_delta == "a"


async def test_a_refusal_that_nobody_waits_for_is_not_logged() -> None:
    """Of several sequences that are refused together, the first one's refusal is raised; the others are no news."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    refused, ended = make_stream(), make_stream()
    refused.set_admitted(RequestError("the queue is full"))
    ended.set_dead(EngineDeadError("gone"))
    del refused, ended
    gc.collect()
    assert complaints == []


async def test_a_waiting_consumer_hears_of_a_dead_engine_and_leaving_then_aborts_nothing() -> None:
    aborted: list[str] = []
    async with make_stream(aborted) as stream:
        waiting = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        stream.set_admitted(None)
        stream.set_dead(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await waiting
    assert aborted == []
