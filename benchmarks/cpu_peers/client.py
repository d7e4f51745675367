"""Many streams at once from an OpenAI-compatible server, with the client of ``ksana-bench``."""

from __future__ import annotations

import asyncio

import orjson
import uvloop

from cpu_peers.errors import EngineFailed
from cpu_peers.process import ANSWER_DEADLINE_S
from ksana.bench.answers import CompletionAnswer, SseFrames
from ksana.bench.client import Exchange, open_session, send
from ksana.bench.records import RequestRecord


def stream_all(url: str, model: str, prompts: list[list[int]], tokens: int) -> list[RequestRecord]:
    """Send all prompts (token ids) at once and follow their streams to the end.

    Raises:
        EngineFailed: an error, another number of tokens, or no end in time.
    """
    records = uvloop.run(_stream_all(url, model, prompts, tokens))
    for record in records:
        if record.failure is not None:
            raise EngineFailed(f"a stream failed: {record.failure.kind}: {record.failure.detail}")
        if record.output_tokens != tokens or not record.chunk_times:
            raise EngineFailed(f"a stream brought {record.output_tokens} tokens instead of {tokens}")
    return records


async def _stream_all(url: str, model: str, prompts: list[list[int]], tokens: int) -> list[RequestRecord]:
    exchanges = [
        Exchange(index, f"{url}/v1/completions", _body(model, prompt, tokens), CompletionAnswer(SseFrames()))
        for index, prompt in enumerate(prompts)
    ]
    async with open_session({}, request_timeout_s=ANSWER_DEADLINE_S, stall_timeout_s=ANSWER_DEADLINE_S) as session:
        return list(await asyncio.gather(*(send(session, exchange) for exchange in exchanges)))


def _body(model: str, prompt: list[int], tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
