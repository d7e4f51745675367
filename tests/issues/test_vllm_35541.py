"""vllm#35541, vllm#39734: a request that can never fit the block pool hung for ever and blocked the queue."""

from __future__ import annotations

import pytest

from ksana.errors import KsanaCode, RequestError
from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.testing.paged_memory import PagedMemoryExecutor, make_kv_config
from ksana.types.config import SchedulerConfig
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams


@pytest.mark.parametrize(("prompt", "output"), [(113, 1), (1, 113), (60, 60)])
def test_request_that_can_never_fit_is_refused_and_the_next_is_served(prompt: int, output: int) -> None:
    config = make_kv_config(7, 16)
    kv = KVCacheManager(config)
    scheduler, executor = Scheduler(SchedulerConfig(), kv), PagedMemoryExecutor(config)

    def request(name: str, prompt: int, output: int) -> Request:
        return Request(name, list(range(prompt)), SamplingParams(), max_total_tokens=prompt + output)

    with pytest.raises(RequestError, match=r"can never fit the KV cache of 7 blocks of 16 tokens") as caught:
        scheduler.add_request(request("big", prompt, output))
    assert (caught.value.status, caught.value.code) == (400, "kv_capacity")
    assert caught.value.ksana_code == KsanaCode.LENGTH_EXCEEDED
    assert not scheduler.has_work()

    largest = request("largest", 100, 12)
    scheduler.add_request(largest)
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.update_from_output(step, executor.execute(step))
    assert largest.status is RequestStatus.FINISHED_LENGTH
    assert kv.num_free_blocks == 7
