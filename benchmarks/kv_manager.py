"""Cost of the KV cache manager for one long prompt: hashing, prefix lookup, allocation, registration, release.

    python benchmarks/kv_manager.py                           # 100,000 tokens, 95 % of them cached
    python benchmarks/kv_manager.py --tokens 8000 --hit 0.5 --block-size 32
    python benchmarks/kv_manager.py --window 1024             # of a model that has sliding windows too

The cache is full of findable blocks that nobody uses, so every allocated block evicts one. Prompts are measured with
and without the events of the cache (``--kv-events``) in turns. A prompt's blocks are hashed on the way, within
find_prefix. Beside the hasher alone stands the bound of its algorithm: SHA-256 over the same chain of bytes, cut into
blocks beforehand. Medians of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence

from ksana.kv import BlockHasher, KVCacheManager
from ksana.kv_events.log import EventLog
from ksana.kv_events.recorder import KVEventRecorder
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec, cdiv
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

VOCAB_SIZE = 128_000
STAGES = ("find_prefix", "admit", "commit", "free", "flush of events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of the prompt")
    parser.add_argument("--hit", type=float, default=0.95, help="share of the prompt that is cached, 0 to 1")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--window", type=int, default=0, help="a sliding window beside full attention; 0: none")
    parser.add_argument("--rounds", type=int, default=20, help="prompts to measure each way")
    arguments = parser.parse_args()
    if not 0 <= arguments.hit <= 1 or min(arguments.tokens, arguments.block_size, arguments.rounds) < 1:
        sys.exit("kv_manager.py: --hit must be from 0 to 1, and the other numbers positive")
    rng = random.Random(0)
    measure_hashing(rng, arguments.tokens, arguments.block_size, arguments.rounds)
    benches = {"without events": Bench(arguments, events=False), "with events": Bench(arguments, events=True)}
    seconds: dict[str, list[dict[str, float]]] = {title: [] for title in benches}
    gc.freeze()  # as the server does once its model is loaded
    for _ in range(arguments.rounds):
        for title, bench in benches.items():
            seconds[title].append(bench.measure(rng))
    for title, rounds in seconds.items():
        report(title, rounds)


def measure_hashing(rng: random.Random, num_tokens: int, block_size: int, rounds: int) -> None:
    """Print tokens hashed per second, and what SHA-256 alone would do."""
    hasher = BlockHasher(block_size, "bench")
    tokens = random_tokens(rng, num_tokens)
    packed = array("I", tokens).tobytes()
    size = 4 * block_size
    blocks = [packed[start : start + size] for start in range(0, len(packed) // size * size, size)]
    ours = median_seconds(lambda: hasher.extend(new_request("hashed", tokens)), rounds)
    bound = median_seconds(lambda: hash_chain(blocks), rounds)
    print(
        f"hashing: {num_tokens / ours / 1e6:.1f} M tokens/s; "
        f"SHA-256 alone {num_tokens / bound / 1e6:.1f} M tokens/s, {bound / ours:.2f} of the time"
    )


def hash_chain(blocks: Sequence[bytes]) -> bytes:
    digest = b"\0" * 32
    for block in blocks:
        digest = hashlib.sha256(digest + block).digest()
    return digest


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class NullPublisher:
    """Events end here; sending them is the work of another thread."""

    def notify(self) -> None:
        """Leave them in the log."""

    def close(self) -> None:
        """There is nothing to close."""


class Bench:
    """A manager whose cache holds the common beginning of all prompts, and is full."""

    def __init__(self, arguments: argparse.Namespace, *, events: bool) -> None:
        self._num_tokens = arguments.tokens
        num_blocks = cdiv(arguments.tokens, arguments.block_size)
        spec = FullAttentionSpec(arguments.block_size, 1, 64, "bfloat16")
        groups = [KVCacheGroup(spec, (0,), 3 * num_blocks + 1)]
        if arguments.window:
            window = SlidingWindowSpec(arguments.block_size, 1, 64, "bfloat16", arguments.window)
            groups.append(KVCacheGroup(window, (1,), 3 * num_blocks + 1))
        config = KVCacheConfig(tuple(groups))
        self._recorder = KVEventRecorder(config, EventLog(1000), NullPublisher()) if events else None
        self._kv = KVCacheManager(config, observer=self._recorder)
        self._prefix = random_tokens(random.Random(1), int(arguments.tokens * arguments.hit))
        rng = random.Random(2)
        while self._kv.num_free_cached_blocks < self._kv.num_usable_blocks:
            self._run(random_tokens(rng, num_blocks * arguments.block_size))
        if self._prefix:
            self._run(self._prefix)

    def measure(self, rng: random.Random) -> dict[str, float]:
        """Seconds of each stage for a prompt that begins with the cached tokens and goes on with new ones."""
        return self._run(self._prefix + random_tokens(rng, self._num_tokens - len(self._prefix)))

    def _run(self, tokens: list[int]) -> dict[str, float]:
        """The whole life of a request: seconds of each stage."""
        kv, request = self._kv, new_request("request", tokens)
        started = time.perf_counter()
        hit = kv.find_prefix(request)
        found = time.perf_counter()
        block_ids = kv.admit(request, hit, request.num_tokens - hit.num_tokens)
        admitted = time.perf_counter()
        assert block_ids is not None, "the cache is made large enough"
        request.num_computed_tokens = request.num_tokens
        computed = time.perf_counter()
        kv.commit(request)
        committed = time.perf_counter()
        kv.free(request)
        freed = time.perf_counter()
        if self._recorder is not None:
            self._recorder.flush()
        flushed = time.perf_counter()
        times = (found - started, admitted - found, committed - computed, freed - committed, flushed - freed)
        return dict(zip(STAGES, times, strict=True))


def new_request(request_id: str, tokens: list[int]) -> Request:
    return Request(request_id, tokens, SamplingParams(), max_total_tokens=len(tokens) + 1)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=count)


def report(title: str, rounds: list[dict[str, float]]) -> None:
    medians = {stage: statistics.median(r[stage] for r in rounds) * 1e3 for stage in STAGES}
    total = statistics.median(r["find_prefix"] + r["admit"] for r in rounds) * 1e3
    stages = ", ".join(f"{stage} {value:.2f}" for stage, value in medians.items())
    print(f"{title}: lookup and allocation {total:.2f} ms ({stages})")


if __name__ == "__main__":
    main()
