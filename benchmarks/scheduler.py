"""Cost of a step without a model: scheduling, taking in the tokens, and turning them into text; memory over many steps.

    python benchmarks/scheduler.py --requests 256 --steps 10000
    python benchmarks/scheduler.py --trace /tmp/trace.json    # and with tracing, in turns
    python benchmarks/scheduler.py --vllm --requests 32 256   # and vLLM V1's scheduler and output processor, in turns

Requests are replaced as they end, so that admission, prefix lookup, growth and release are all part of the figure. The
tokenizer is the demo model's; the tokens are random ones. The time of the executor, which makes them up, is left out.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array
from pathlib import Path

from cpu_peers.errors import EngineFailed
from cpu_peers.vllm_step import measure_vllm_steps
from null_executor import NullExecutor

from ksana.engine.core import EngineCore
from ksana.engine.output_processor import OutputProcessor
from ksana.engine.trace import EngineTrace, NoTrace
from ksana.kv import KVCacheManager
from ksana.models.gguf_tokenizer import create_gguf_tokenizer
from ksana.models.hf_tokenizer import create_hf_tokenizer
from ksana.models.locate import resolve_model
from ksana.plugin.manager import KsanaPluginManager
from ksana.scheduling import RequestUpdate, Scheduler
from ksana.text.tokenizer import Tokenizer
from ksana.types.config import SchedulerConfig
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.types.step import ModelRunnerOutput, SchedulerOutput

BENCH_FOLDER = Path(__file__).parent.parent / ".bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[256], help="requests running at once")
    parser.add_argument("--steps", type=int, default=10_000, help="steps to measure")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--trace", default="", metavar="FILE", help="measure with tracing to FILE too")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure each")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too, which is installed if it is not there")
    parser.add_argument("--venvs", type=Path, default=BENCH_FOLDER, metavar="DIR", help="as of compare_cpu.py")
    arguments = parser.parse_args()
    tokenizer = demo_tokenizer()
    gc.freeze()  # as the server does once its model is loaded
    for num_requests in arguments.requests:
        for _ in range(arguments.rounds):
            measure_round(arguments, num_requests, tokenizer)
        before, after = measure_memory(arguments, num_requests, tokenizer)
        print(f"Python memory after a tenth of the steps {before / 2**20:.2f} MiB, at the end {after / 2**20:.2f} MiB")


def measure_round(arguments: argparse.Namespace, num_requests: int, tokenizer: Tokenizer) -> None:
    """Measure once, with each of the things that the arguments ask to be set beside it."""
    means = []
    for trace in ["", arguments.trace] if arguments.trace else [""]:
        bench = Bench(arguments, num_requests, tokenizer, EngineTrace(trace) if trace else NoTrace())
        started = time.process_time()
        bench.run()
        report(bench, time.process_time() - started, "with tracing" if trace else "without tracing")
        means.append(statistics.mean(bench.times))
    if arguments.vllm:
        try:
            theirs = measure_vllm_steps(
                arguments.venvs, num_requests, arguments.steps, arguments.prompt, arguments.output
            )
        except EngineFailed as error:
            print(f"vLLM: {error}")
        else:
            report_vllm(theirs, means[0], num_requests)


def report_vllm(seconds: list[float], ours: float, num_requests: int) -> None:
    mean = statistics.mean(seconds)
    print(
        f"vLLM, {num_requests} running, {len(seconds)} steps: mean {mean * 1e3:.3f} ms, "
        f"median {statistics.median(seconds) * 1e3:.3f} ms a step; ours takes {ours / mean:.2f} of its mean"
    )


def report(bench: Bench, cpu_seconds: float, title: str) -> None:
    milliseconds = sorted(t * 1e3 for t in bench.times)
    count = len(milliseconds)
    print(
        f"{title}, {bench.num_requests} running, {count} steps: mean {statistics.mean(milliseconds):.3f} ms, "
        f"median {statistics.median(milliseconds):.3f} ms, p99 {milliseconds[int(count * 0.99)]:.3f} ms a step; "
        f"schedule() {bench.scheduler.scheduling / count * 1e3:.3f} ms, "
        f"update_from_output() {bench.scheduler.updating / count * 1e3:.3f} ms; "
        f"CPU time of all threads, executor included, {cpu_seconds / count * 1e3:.3f} ms"
    )


def measure_memory(arguments: argparse.Namespace, num_requests: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """Traced bytes after a tenth of the steps and at the end."""
    marks = array("q")
    tracemalloc.start()
    bench = Bench(arguments, num_requests, tokenizer, NoTrace())
    bench.run(marks)
    tracemalloc.stop()
    return marks[0], marks[-1]


def demo_tokenizer() -> Tokenizer:
    path = resolve_model("demo")
    tokenizer = create_gguf_tokenizer(path) if path.suffix == ".gguf" else create_hf_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


class TimedScheduler(Scheduler):
    """Adds up the seconds of its two calls."""

    scheduling = updating = 0.0

    def schedule(self) -> SchedulerOutput:
        started = time.perf_counter()
        step = super().schedule()
        self.scheduling += time.perf_counter() - started
        return step

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        started = time.perf_counter()
        updates = super().update_from_output(step, output)
        self.updating += time.perf_counter() - started
        return updates


class Bench:
    """An engine core without a model, and enough requests to keep it full."""

    def __init__(self, arguments: argparse.Namespace, num_requests: int, tokenizer: Tokenizer, trace: NoTrace) -> None:
        self.num_requests, self._prompt, self._output = num_requests, arguments.prompt, arguments.output
        self._rng = random.Random(0)
        num_blocks = 2 * self.num_requests * (self._prompt + self._output) // 16
        group = KVCacheGroup(FullAttentionSpec(16, 1, 64, "float32"), (0,), num_blocks)
        kv = KVCacheManager(KVCacheConfig((group,)))
        config = SchedulerConfig(max_num_seqs=self.num_requests, max_num_batched_tokens=self.num_requests + 4096)
        self.scheduler = TimedScheduler(config, kv)
        self._executor = NullExecutor(tokenizer.vocab_size, self._rng)
        hook = KsanaPluginManager().hook
        self._core = EngineCore(self.scheduler, self._executor, OutputProcessor(tokenizer), hook, trace=trace)
        self._num_arrived = 0
        # Of its final size: a growing list would show in the figure for memory.
        self.times = array("d", bytes(8 * arguments.steps))

    def run(self, marks: array[int] | None = None) -> None:
        """Measure all steps; ``marks`` gets the traced memory ten times on the way."""
        num_steps = len(self.times)
        for number in range(num_steps):
            while len(self.scheduler.requests) < self.num_requests:
                self._add()
            computing = self._executor.seconds
            started = time.perf_counter()
            self._core.step()
            self.times[number] = time.perf_counter() - started - (self._executor.seconds - computing)
            if marks is not None and (number + 1) % max(1, num_steps // 10) == 0:
                gc.collect()
                marks.append(tracemalloc.get_traced_memory()[0])
        self._core.close()

    def _add(self) -> None:
        tokens = [self._rng.randrange(49_000) for _ in range(self._prompt)]
        limit = self._prompt + self._rng.randrange(self._output // 2, self._output)
        self._core.add(Request(str(self._num_arrived), tokens, SamplingParams(), max_total_tokens=limit))
        self._num_arrived += 1


if __name__ == "__main__":
    main()
