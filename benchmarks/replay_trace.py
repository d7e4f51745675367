"""Replay a trace of requests through the real scheduler and KV cache manager, without a model.

    python benchmarks/replay_trace.py conversation_trace.jsonl
    python benchmarks/replay_trace.py conversation_trace.jsonl --cache-tokens 2000000 --minutes 5

The trace has the format of Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object a line,
with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, one for each 512 tokens of the
prompt, where equal ids are equal prefixes. Each id becomes 512 tokens; answers are new tokens, which no later prompt
repeats.

Time is simulated: requests arrive by their timestamps, and a step takes ``--step-ms`` and what its tokens take at
``--tokens-per-second``. So requests wait, run side by side and hold their blocks as they would on such a device.

Beside the hit rate stands that of an oracle: a plain LRU list of as many blocks, for which each request is over as soon
as it arrives, holds nothing, and leaves all its blocks at once. The ideal is the oracle with room for everything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from null_executor import NullExecutor
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ksana.errors import RequestError
from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.types.config import SchedulerConfig
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import SchedulerOutput

HASH_TOKENS = 512
"""Tokens of a prompt for which the trace has an id."""

COLUMNS = (
    "cache tokens",
    "hit rate",
    "LRU oracle",
    "ideal",
    "evictions",
    "preemptions",
    "steps",
    "simulated s",
    "wall s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="file of the trace")
    parser.add_argument("--minutes", type=float, default=20.0, help="how much of the trace to replay")
    parser.add_argument(
        "--cache-tokens", type=int, nargs="+", default=[500_000, 2_000_000, 8_000_000, 32_000_000], metavar="N"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block; divides 512")
    parser.add_argument("--tokens-per-second", type=float, default=60_000.0, help="speed of the simulated device")
    parser.add_argument("--step-ms", type=float, default=10.0, help="what each of its steps takes besides")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="as of ksana-serve")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="as of ksana-serve")
    arguments = parser.parse_args()
    if HASH_TOKENS % arguments.block_size:
        sys.exit(f"replay_trace.py: --block-size must divide {HASH_TOKENS}")
    trace = [request for request in read_trace(arguments.trace) if request.arrival_s < arguments.minutes * 60]
    num_tokens = sum(request.input_length for request in trace)
    print(f"{len(trace)} requests with {num_tokens} tokens of prompts\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    ideal = oracle_hit_rate(trace, arguments.block_size, sys.maxsize)
    for cache_tokens in arguments.cache_tokens:
        num_blocks = cache_tokens // arguments.block_size
        replay = Replay(arguments, num_blocks)
        seconds = run_with_bar(replay, trace, f"{cache_tokens:,} tokens")
        rates = (replay.num_hit_tokens / num_tokens, oracle_hit_rate(trace, arguments.block_size, num_blocks), ideal)
        counts = (replay.observer.num_removed, replay.scheduler.num_preemptions, replay.num_steps)
        cells = [f"{cache_tokens:,}", *(f"{rate:.1%}" for rate in rates), *(f"{count:,}" for count in counts)]
        print("| " + " | ".join([*cells, f"{replay.now:.0f}", f"{seconds:.1f}"]) + " |", flush=True)


def run_with_bar(replay: Replay, trace: list[TraceRequest], title: str) -> float:
    """Run a replay under a progress bar, if stderr is a terminal; returns the seconds it took."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(title, total=len(trace))
        started = time.perf_counter()
        replay.run(trace, lambda: progress.advance(bar))
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A line of the trace."""

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def prompt(self) -> list[int]:
        """Tokens that are equal where the ids are: each id, 512 times."""
        return [hash_id for hash_id in self.hash_ids for _ in range(HASH_TOKENS)][: self.input_length]


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace, in order of arrival; ends the command if the file is not one."""
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                raw = json.loads(line)
                yield TraceRequest(
                    raw["timestamp"] / 1e3, raw["input_length"], raw["output_length"], tuple(raw["hash_ids"])
                )
    except OSError as error:
        sys.exit(f"replay_trace.py: {path}: {error.strerror}")
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"replay_trace.py: {path}, line {number}: no request of a trace: {error!r}")


class CountingObserver:
    """Counts blocks that could be found, and cannot be any more; see ``KVCacheObserver``."""

    num_removed = 0

    def blocks_stored(self, request: Request, group_id: int, first_index: int, block_hashes: Sequence[bytes]) -> None:
        """Nobody asks."""

    def block_removed(self, group_id: int, block_hash: bytes) -> None:
        """Count a block that was evicted."""
        self.num_removed += 1

    def all_blocks_cleared(self) -> None:
        """Nobody does that here."""


class Replay:
    """A scheduler, its cache and a simulated device.

    Attributes:
        now: simulated seconds since the trace began.
        num_hit_tokens: tokens of prompts that were found in the cache when their request was first admitted.
    """

    def __init__(self, arguments: argparse.Namespace, num_blocks: int) -> None:
        self._seconds_per_step = arguments.step_ms / 1e3
        self._seconds_per_token = 1 / arguments.tokens_per_second
        spec = FullAttentionSpec(arguments.block_size, 1, 64, "bfloat16")
        self.observer = CountingObserver()
        cache = KVCacheConfig((KVCacheGroup(spec, (0,), num_blocks + 1),))  # one more: the null block
        kv = KVCacheManager(cache, observer=self.observer)
        config = SchedulerConfig(
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            max_num_seqs=arguments.max_num_seqs,
            max_mixed_prefill_tokens=0,
            max_waiting_queue_len=sys.maxsize,
            waiting_timeout_s=sys.maxsize,
        )
        self.scheduler = Scheduler(config, kv, clock=lambda: self.now)
        self._executor = NullExecutor(2**31, random.Random(0))
        self.now = 0.0
        self.num_steps = self.num_hit_tokens = 0

    def run(self, trace: list[TraceRequest], advance: Callable[[], None]) -> None:
        """Serve all requests; ``advance`` is called for each one that has its answer."""
        for index, traced in enumerate(trace):
            while self.now < traced.arrival_s and self.scheduler.has_work():
                self._step(advance)
            self.now = max(self.now, traced.arrival_s)
            self._add(str(index), traced)
        while self.scheduler.has_work():
            self._step(advance)

    def _add(self, request_id: str, traced: TraceRequest) -> None:
        total = traced.input_length + traced.output_length
        request = Request(
            request_id,
            traced.prompt(),
            SamplingParams(ignore_eos=True),
            max_total_tokens=total,
            arrival_time=traced.arrival_s,
        )
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            sys.exit(f"replay_trace.py: --cache-tokens is less than a request of {total} tokens takes: {error}")

    def _step(self, advance: Callable[[], None]) -> None:
        step = self.scheduler.schedule()
        self.num_steps += 1
        self.now += self._seconds(step)
        for update in self.scheduler.update_from_output(step, self._executor.execute(step)):
            if update.request.status.is_finished:
                self.num_hit_tokens += update.request.num_cached_tokens
                advance()

    def _seconds(self, step: SchedulerOutput) -> float:
        num_tokens = sum(step.num_scheduled_tokens.values())
        return self._seconds_per_step + num_tokens * self._seconds_per_token if num_tokens else 0.0


def oracle_hit_rate(trace: list[TraceRequest], block_size: int, num_blocks: int) -> float:
    """Share of all prompts' tokens that a plain LRU cache of ``num_blocks`` blocks would have."""
    cache: OrderedDict[Hashable, None] = OrderedDict()
    num_hit_tokens = 0
    for index, request in enumerate(trace):
        keys = [
            (request.hash_ids[start // HASH_TOKENS], start % HASH_TOKENS)
            for start in range(0, request.input_length - block_size + 1, block_size)
        ]
        num_hits = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        num_hit_tokens += min(num_hits, (request.input_length - 1) // block_size) * block_size
        answer = range(len(keys), (request.input_length + request.output_length - 1) // block_size)
        # The end of a prompt is of no use without its beginning, so it is to go first.
        for key in [*(("answer", index, i) for i in reversed(answer)), *reversed(keys)]:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hit_tokens / sum(request.input_length for request in trace)


if __name__ == "__main__":
    main()
