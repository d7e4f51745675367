"""A server as a process of its own, and what a client of it sees of its prefix cache."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import openai

NUM_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """What came for a prompt, and when its first token did."""

    ttft_s: float
    text: str
    num_cached_tokens: int


def parse_options(description: str | None) -> argparse.Namespace:
    """``model``, ``tokens``, ``rounds`` and ``threads`` from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of each server; several take turns")
    return parser.parse_args()


@contextmanager
def run_server(
    model: str, flags: Sequence[str], environment: Mapping[str, str] | None = None, settle_s: float = 0.0
) -> Iterator[openai.OpenAI]:
    """Start ``ksana-serve``, wait ``settle_s`` seconds once it is ready, and stop it in the end."""
    command = [sys.executable, "-m", "ksana.cli.serve", "--model", model, "--port", "0", "--log-level", "warning"]
    command += ["--no-access-log", *flags]
    with subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            started = server.stdout.readline()
            if " on " not in started:
                raise SystemExit(f"{started}error: the server did not start; what it wrote is above")
            time.sleep(settle_s)
            address = started.split(" on ")[1].split()[0]
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
                yield client
        finally:
            server.terminate()


def ask(client: openai.OpenAI, prompt: list[int]) -> Answer:
    """Stream an answer."""
    started = time.perf_counter()
    ttft_s, text, num_cached = 0.0, "", 0
    for chunk in client.completions.create(
        model="ksana-llm",
        prompt=prompt,
        max_tokens=NUM_OUTPUT_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        ttft_s = ttft_s or time.perf_counter() - started
        text += "".join(choice.text for choice in chunk.choices)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return Answer(ttft_s, text, num_cached)


def random_prompt(length: int) -> list[int]:
    """Token ids that mean nothing; every vocabulary has them."""
    return [random.randrange(100, 20_000) for _ in range(length)]
