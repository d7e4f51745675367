"""Cost of scheduling without a model: ``schedule()`` + ``update_from_output()`` per step, and memory over many steps.

    python benchmarks/scheduler.py --requests 256 --steps 10000

Requests are replaced as they end, so that admission, prefix lookup, growth and release are all part of the figure.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array

from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.types.config import SchedulerConfig
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import ModelRunnerOutput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="requests running at once")
    parser.add_argument("--steps", type=int, default=10_000, help="steps to measure")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer, at most")
    arguments = parser.parse_args()
    times, before, after = run(arguments.requests, arguments.steps, arguments.prompt, arguments.output)
    milliseconds = sorted(t * 1e3 for t in times)
    p99 = milliseconds[int(len(milliseconds) * 0.99)]
    print(
        f"{arguments.requests} running, {arguments.steps} steps: mean {statistics.mean(milliseconds):.3f} ms, "
        f"median {statistics.median(milliseconds):.3f} ms, p99 {p99:.3f} ms a step"
    )
    print(f"Python memory after a tenth of the steps {before / 2**20:.2f} MiB, at the end {after / 2**20:.2f} MiB")


def run(num_requests: int, num_steps: int, prompt: int, output: int) -> tuple[list[float], int, int]:
    """Returns the seconds of each step (timed without memory tracing) and traced bytes early and late."""
    times = _run(num_requests, num_steps, prompt, output)
    tracemalloc.start()
    marks: list[int] = []
    _run(num_requests, num_steps, prompt, output, marks)
    tracemalloc.stop()
    return times, marks[0], marks[-1]


def _run(num_requests: int, num_steps: int, prompt: int, output: int, marks: list[int] | None = None) -> list[float]:
    rng = random.Random(0)
    group = KVCacheGroup(FullAttentionSpec(16, 1, 64, "float32"), (0,))
    blocks = 2 * num_requests * (prompt + output) // 16
    kv = KVCacheManager(KVCacheConfig(blocks, (group,)))
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=num_requests + 4096)
    scheduler = Scheduler(config, kv)
    arrived = 0
    times = array("d", bytes(8 * num_steps))  # of its final size: a growing list would show in the figure for memory
    for step_number in range(num_steps):
        while len(scheduler.requests) < num_requests:
            tokens = [rng.randrange(50_000) for _ in range(prompt)]
            limit = prompt + rng.randrange(output // 2, output)
            scheduler.add_request(Request(str(arrived), tokens, SamplingParams(), max_total_tokens=limit))
            arrived += 1
        started = time.perf_counter()
        step = scheduler.schedule()
        elapsed = time.perf_counter() - started
        requests = scheduler.requests
        sampled = {
            request_id: [7]
            for request_id, count in step.num_scheduled_tokens.items()
            if requests[request_id].num_computed_tokens + count == requests[request_id].num_tokens
        }
        started = time.perf_counter()
        scheduler.update_from_output(step, ModelRunnerOutput(sampled))
        times[step_number] = elapsed + time.perf_counter() - started
        if marks is not None and (step_number + 1) % max(1, num_steps // 10) == 0:
            gc.collect()
            marks.append(tracemalloc.get_traced_memory()[0])
    return list(times)


if __name__ == "__main__":
    main()
