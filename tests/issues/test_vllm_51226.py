"""vllm#51226: on the CPU, the seed of a request was ignored when an unseeded one was in the same batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ksana.kernels.cpu.backend import CPUBackend
from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.testing.random_llama import random_llama
from ksana.types.config import CacheConfig, KernelConfig, SchedulerConfig
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams
from ksana.worker.cache_size import plan_kv_cache
from ksana.worker.model_runner import ModelRunner

SEEDED = SamplingParams(temperature=1.5, top_p=0.95, seed=7)
PROMPT = [5, 4, 3, 2, 1, 6, 7]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answer(
    before: list[SamplingParams], after: list[SamplingParams], chunk: int = 0, num_blocks: int = 100
) -> list[int]:
    """Tokens of the seeded request among others that arrive before and after it."""
    backend = CPUBackend(KernelConfig(threads=1))
    model, _ = random_llama(backend)
    cache = CacheConfig(num_blocks=num_blocks, block_size=4)
    config = plan_kv_cache(
        model.config, cache, SchedulerConfig(), max_model_len=64, available_memory=backend.available_memory
    )
    scheduler = Scheduler(SchedulerConfig(split_fuse_token_num=chunk, launch_block_threshold=1), KVCacheManager(config))
    runner = ModelRunner(model, backend, backend.allocate_kv_cache(config), max_num_seqs=8, max_model_len=64)
    requests = []
    for index, sampling in enumerate([*before, SEEDED, *after]):
        prompt = PROMPT if sampling is SEEDED else [index + 10] * 5
        seed = sampling.seed if sampling.seed is not None else 1000 + index
        requests.append(Request(f"r{index}", prompt, sampling, max_total_tokens=len(prompt) + 16, seed=seed))
        scheduler.add_request(requests[-1])
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.update_from_output(step, runner.execute(step))
    if num_blocks < 20:
        assert scheduler.num_preemptions > 0
    return requests[len(before)].output_token_ids


def test_seeded_answer_does_not_depend_on_the_rest_of_the_batch() -> None:
    unseeded, greedy, other = SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5, seed=8)
    alone = answer([], [])
    assert len(set(alone)) > 3, "it does sample"
    assert answer([unseeded], []) == alone
    assert answer([], [unseeded, greedy]) == alone
    assert answer([greedy, other, unseeded], [other]) == alone
    assert answer([unseeded], [greedy], chunk=3) == alone
    assert answer([unseeded, unseeded], [], num_blocks=13) == alone
