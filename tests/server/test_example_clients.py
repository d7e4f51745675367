"""The programs in examples/ksana_client work as they stand there."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ksana import SamplingParams
from ksana.builtins import native_api
from ksana.engine.async_engine import AsyncEngine
from ksana.testing.live_server import live_server
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft

EXAMPLES = Path(__file__).parents[2] / "examples" / "ksana_client"
PREFIX, TEXT = "The capital of France is", " Paris, and it lies on the river Seine."


@pytest.fixture(scope="module")
def engine(tiny_path: Callable[..., Path]) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.load(str(tiny_path()), dtype="bfloat16", num_blocks=64, threads=1)
    yield engine
    asyncio.run(engine.stop("the tests are done"))


def run(engine: AsyncEngine, program: str, *arguments: str) -> str:
    with live_server(engine, native_api) as url:
        command = [sys.executable, str(EXAMPLES / program), "--url", url, *arguments]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def finish(engine: AsyncEngine, draft: RequestDraft) -> RequestOutput:
    async def result() -> RequestOutput:
        async with await engine.submit(draft) as stream:
            return await stream.result()

    return asyncio.run(result())


def test_the_generate_client_prints_the_text(engine: AsyncEngine) -> None:
    printed = run(engine, "generate_client.py", "--prompt", PREFIX, "--max-new-tokens", "24")
    draft = RequestDraft(prompt=PREFIX, sampling=SamplingParams(max_tokens=24, temperature=0))
    assert printed == finish(engine, draft).text + "\n"


@pytest.mark.parametrize("content_type", ["msgpack", "json"])
def test_the_forward_client_prints_the_perplexity_of_the_text(engine: AsyncEngine, content_type: str) -> None:
    printed = run(engine, "forward_client.py", "--prefix", PREFIX, "--text", TEXT, "--content-type", content_type)
    output = finish(
        engine, RequestDraft(prompt=PREFIX + TEXT, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    )
    num_prefix_tokens = len(engine.tokenizer.encode(PREFIX))
    losses = [-entry.logprob for entry in output.prompt_logprobs[num_prefix_tokens:] if entry is not None]
    found = re.search(r"perplexity: ([\d.]+)", printed)
    assert found
    assert float(found[1]) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert f"{len(losses)} of them scored" in printed
    assert "shape (1, 64)" in printed
