"""What is measured: scenarios, the engines that run each, and how one round of it is done."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cpu_peers.client import stream_all
from cpu_peers.engines import MODEL_NAME
from cpu_peers.process import DriverProcess, EngineProcess, ServerProcess

Figures = dict[str, float]
"""Metrics of one round by name. Times in seconds, rates in tokens a second, sizes in bytes."""

Measure = Callable[[EngineProcess, int], Figures]
"""Does one round; the number seeds the prompts, so all engines get the same ones."""

TAIL = 32
PREFIX = 768
_WARM_TOKENS = 8
_ONE_AT_A_TIME = 4
_AT_ONCE = 16


@dataclass(frozen=True)
class Scenario:
    """One thing to measure.

    Attributes:
        name: for ``--only``.
        title: for people.
        group: scenarios of one group share the engines' processes; those of another group run after it.
        measures: variants of engines that take part, and how.
        started: variants of which only start and memory are measured, which needs processes rather than requests.
    """

    name: str
    title: str
    group: str
    measures: dict[str, Measure] = field(default_factory=dict)
    started: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """All that take part."""
        return (*self.measures, *self.started)


def random_prompts(count: int, length: int, seed: object) -> list[list[int]]:
    """Prompts of random tokens, none of them special, no prefix shared."""
    rng = random.Random(str(seed))
    return [[rng.randrange(100, 49_000) for _ in range(length)] for _ in range(count)]


def decode(batch: int, length: int = 128, tokens: int = 128) -> Measure:
    """Tokens a second after the first: the time for all tokens less the time for one of each."""

    def measure(process: EngineProcess, seed: int) -> Figures:
        assert isinstance(process, DriverProcess)
        prompts = random_prompts(batch, length, f"decode {batch} {seed}")
        if seed == 0:
            process.generate(prompts, 4)
        first, _ = process.generate(prompts, 1)
        total, _ = process.generate(prompts, tokens)
        return {"rate": batch * (tokens - 1) / (total - first)}

    return measure


def prefill(batch: int, length: int) -> Measure:
    """Prompt tokens a second: one token is generated."""

    def measure(process: EngineProcess, seed: int) -> Figures:
        assert isinstance(process, DriverProcess)
        prompts = random_prompts(batch, length, f"prefill {batch} {seed}")
        if seed == 0:
            process.generate(prompts, 1)
        seconds, _ = process.generate(prompts, 1)
        return {"rate": batch * length / seconds}

    return measure


def offline_batch(batch: int, length: int, tokens: int) -> Measure:
    """Generated tokens a second with the prefill included: what a server of the same engine could reach."""

    def measure(process: EngineProcess, seed: int) -> Figures:
        assert isinstance(process, DriverProcess)
        if seed == 0:
            process.generate(random_prompts(batch, length, "warm"), 4)
        seconds, _ = process.generate(random_prompts(batch, length, f"streams {seed}"), tokens)
        return {"rate": batch * tokens / seconds}

    return measure


def streams(batch: int, length: int, tokens: int) -> Measure:
    """Many streams at once: rate, time to the first token, gaps between tokens."""

    def measure(process: EngineProcess, seed: int) -> Figures:
        assert isinstance(process, ServerProcess)
        if seed == 0:
            stream_all(process.url, MODEL_NAME, random_prompts(batch, length, "warm"), 8)
        answers = stream_all(process.url, MODEL_NAME, random_prompts(batch, length, f"streams {seed}"), tokens)
        wall = max(answer.end_s for answer in answers) - min(answer.sent_s for answer in answers)
        waits = [answer.chunk_times[0] - answer.sent_s for answer in answers]
        gaps = [gap for answer in answers for gap in answer.gaps_s]
        return {
            "rate": batch * tokens / wall,
            "ttft_p50": float(np.percentile(waits, 50)),
            "ttft_p99": float(np.percentile(waits, 99)),
            "itl_p50": float(np.percentile(gaps, 50)),
            "itl_p99": float(np.percentile(gaps, 99)),
        }

    return measure


def warm_prefix(process: EngineProcess, seed: int) -> Figures:
    """Time to the first token after a cached beginning; and of prompts that are only as long as the rest."""
    assert isinstance(process, ServerProcess)

    def waits(prompts: list[list[int]]) -> list[float]:
        answers = stream_all(process.url, MODEL_NAME, prompts, _WARM_TOKENS)
        return [answer.chunk_times[0] - answer.sent_s for answer in answers]

    def alone_and_at_once(kind: str, prefix: list[int]) -> tuple[float, float]:
        tails = random_prompts(_ONE_AT_A_TIME + _AT_ONCE, TAIL, f"{kind} {seed}")
        prompts = [prefix + tail for tail in tails]
        alone = [waits([prompt])[0] for prompt in prompts[:_ONE_AT_A_TIME]]
        return statistics.median(alone), statistics.median(waits(prompts[_ONE_AT_A_TIME:]))

    prefix = random_prompts(1, PREFIX, f"prefix {seed}")[0]
    waits([prefix + tail for tail in random_prompts(1, TAIL, f"first {seed}")])
    one, sixteen = alone_and_at_once("warm", prefix)
    short_one, short_sixteen = alone_and_at_once("short", [])
    return {"ttft_1": one, "ttft_16": sixteen, "short_ttft_1": short_one, "short_ttft_16": short_sixteen}


def fill_cache(process: EngineProcess, num_tokens: int) -> None:
    """Prompts that together fill the KV cache of a server, so that all of its memory is touched."""
    assert isinstance(process, ServerProcess)
    for batch in range(num_tokens // 4096 + 1):
        stream_all(process.url, MODEL_NAME, random_prompts(8, 512, f"fill {batch}"), 1)


OFFLINE = ("ksana", "llama_cpp", "openvino", "vllm", "transformers")


def _for_all(measure: Measure) -> dict[str, Measure]:
    return dict.fromkeys(OFFLINE, measure)


_INT4 = dict.fromkeys(("ksana_int4", "llama_cpp_q4_1", "ksana"), decode(1))

_SERVERS = {"ksana_server": streams(32, 128, 64), "vllm_server": streams(32, 128, 64)}

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("decode_1", "decode, 1 stream", "offline", _for_all(decode(1))),
        Scenario("decode_8", "decode, 8 streams", "offline", _for_all(decode(8))),
        Scenario("decode_32", "decode, 32 streams", "offline", _for_all(decode(32))),
        Scenario("prefill_1x1024", "prefill, 1 x 1024", "offline", _for_all(prefill(1, 1024))),
        Scenario("prefill_8x512", "prefill, 8 x 512", "offline", _for_all(prefill(8, 512))),
        Scenario("int4_decode_1", "int4 decode, 1 stream", "int4", _INT4),
        Scenario(
            "server_32",
            "server, 32 streams, 128 in, 64 out",
            "server",
            {**_SERVERS, "ksana": offline_batch(32, 128, 64)},
        ),
        Scenario(
            "warm_prefix",
            f"warm prefix, {PREFIX} of {PREFIX + TAIL} tokens",
            "server",
            dict.fromkeys(_SERVERS, warm_prefix),
        ),
        Scenario("start", "ready after start; resident memory", "start", started=("ksana_demo", *OFFLINE[1:])),
    )
}
"""By name, in the order in which they run."""
