"""vLLM's scheduler and output processing without a model, for ``benchmarks/scheduler.py``. Runs in vLLM's environment.

    python vllm_scheduler.py '{"model": FOLDER, "requests": 256, "steps": 1000, "prompt": 128, "output": 256}'

Prints ``{"seconds": [...]}``: schedule, update and output processing of each step. What the executor would do (making
up tokens) is left out, and so is making requests.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
from protocol import take_stdout
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
VOCAB_SIZE = 49_000


class Bench:
    """A scheduler, an output processor, and enough requests to keep them full. Settings as in the module's text."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._num_requests = settings["requests"]
        self._prompt, self._output = settings["prompt"], settings["output"]
        self._rng = random.Random(0)
        config = EngineArgs(
            settings["model"],
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_model_len=2 * (self._prompt + self._output),
            max_num_seqs=self._num_requests,
            max_num_batched_tokens=self._num_requests + 4096,
            enable_prefix_caching=True,
            async_scheduling=False,
        ).create_engine_config()
        blocks = 2 * self._num_requests * (self._prompt + self._output) // BLOCK_SIZE
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self._scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE, BLOCK_SIZE)
        self._outputs = OutputProcessor(get_tokenizer(settings["model"]), log_stats=False)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._missing: dict[str, int] = {}
        self._num_arrived = 0

    def step(self) -> float:
        """Fill up with requests, then move all on; returns the seconds of the latter."""
        while len(self._missing) < self._num_requests:
            self._add()
        started = time.perf_counter()
        step = self._scheduler.schedule()
        seconds = time.perf_counter() - started
        sampled = self._execute(step)
        started = time.perf_counter()
        news = self._scheduler.update_from_output(step, sampled)
        for outputs in news.values():
            self._outputs.process_outputs(outputs.outputs)
        seconds += time.perf_counter() - started
        for outputs in news.values():
            for output in outputs.outputs:
                if output.finished:
                    del self._missing[output.request_id]
        return seconds

    def _add(self) -> None:
        name = str(self._num_arrived)
        self._num_arrived += 1
        tokens = [self._rng.randrange(VOCAB_SIZE) for _ in range(self._prompt)]
        sampling = SamplingParams(
            max_tokens=self._rng.randrange(self._output // 2, self._output),
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
        )
        self._outputs.add_request(request, None)
        self._scheduler.add_request(Request.from_engine_core_request(request, self._hasher))
        self._missing[name] = len(tokens)

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """A random token for every request whose prompt is complete."""
        tokens: list[list[int]] = []
        for name, count in step.num_scheduled_tokens.items():
            self._missing[name] -= count
            complete = self._missing[name] == 0
            self._missing[name] += complete
            tokens.append([self._rng.randrange(VOCAB_SIZE)] if complete else [])
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)


def main() -> None:
    answers = take_stdout()
    settings = json.loads(sys.argv[1])
    bench = Bench(settings)
    seconds = [bench.step() for _ in range(settings["steps"])]
    answers.write(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
