"""vllm#35943, #50425, sglang#28651: who waited for KV that never came waited for ever, and held its blocks."""

from __future__ import annotations

import pytest

from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.testing.paged_memory import PagedMemoryExecutor, make_kv_config
from ksana.testing.scripted_kv_connector import ScriptedKVConnector, TransferScript
from ksana.types.config import KVTransferConfig, SchedulerConfig
from ksana.types.request import Request, RequestStatus
from ksana.types.sampling import SamplingParams

LOAD_TIMEOUT_S, FREE_TIMEOUT_S = 5.0, 20.0


class Side:
    """One engine whose peer has gone silent."""

    def __init__(self, script: TransferScript) -> None:
        config = make_kv_config(40, 4)
        self.now = 0.0
        self.kv = KVCacheManager(config)
        self.executor = PagedMemoryExecutor(config)
        self.connector = ScriptedKVConnector(self.kv, self.executor.memory, script)
        transfer = KVTransferConfig(load_timeout_s=LOAD_TIMEOUT_S, free_timeout_s=FREE_TIMEOUT_S)
        self.scheduler = Scheduler(
            SchedulerConfig(), self.kv, connector=self.connector, transfer_config=transfer, clock=lambda: self.now
        )

    def add(self, name: str, num_tokens: int) -> Request:
        request = Request(name, list(range(num_tokens)), SamplingParams(), max_total_tokens=num_tokens + 4)
        self.scheduler.add_request(request)
        return request

    def run_until(self, deadline: float) -> None:
        while self.now < deadline:
            self.now += 1.0
            self.scheduler.expire_waiting()
            step = self.scheduler.schedule()
            if not step.is_empty:
                output = self.connector.worker.execute(step, self.executor)
                self.scheduler.take_in_transfers(step, output)
                self.scheduler.update_from_output(step, output)
            self.kv.check_integrity()


@pytest.fixture
def decoding() -> Side:
    """Its peer has computed a prompt, and never sends it."""
    script = TransferScript(saves=False, never_received=1.0)
    side = Side(script)
    other = Side(TransferScript())
    other.add("theirs", 16)
    other.run_until(20.0)
    side.connector.stored.update(other.connector.stored)
    return side


def test_who_waits_for_kv_that_never_comes_computes_it(decoding: Side) -> None:
    request = decoding.add("mine", 18)
    decoding.run_until(LOAD_TIMEOUT_S)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
    decoding.run_until(LOAD_TIMEOUT_S + 10.0)
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert decoding.kv.usage > 0.0  # a late write must hit nobody
    decoding.run_until(LOAD_TIMEOUT_S + FREE_TIMEOUT_S + 2.0)
    assert decoding.kv.usage == 0.0
    assert not decoding.scheduler.has_work()


def test_who_leaves_while_it_waits_leaves_no_blocks_behind(decoding: Side) -> None:
    request = decoding.add("mine", 18)
    decoding.run_until(2.0)
    decoding.scheduler.abort("mine")
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert decoding.kv.usage > 0.0
    decoding.run_until(2.0 + FREE_TIMEOUT_S + 2.0)
    assert decoding.kv.usage == 0.0
    assert not decoding.scheduler.has_work()


def test_blocks_that_nobody_fetches_are_not_kept_for_ever() -> None:
    prefilling = Side(TransferScript(never_sent=1.0))
    prefilling.add("theirs", 16)
    prefilling.run_until(6.0)
    assert not prefilling.scheduler.requests
    assert prefilling.kv.usage > 0.0
    prefilling.run_until(6.0 + FREE_TIMEOUT_S + 2.0)
    assert prefilling.kv.usage == 0.0
    assert not prefilling.scheduler.has_work()
