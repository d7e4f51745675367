"""LMCache#1034, #1969, #2158: what a lookup pinned was never released, and a hit in the cache made a load negative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ksana.connectors.context import ConnectorContext
from ksana.connectors.memory_store import MemoryStore
from ksana.connectors.store_connector import StoreConnector
from ksana.connectors.store_scheduler import StorePolicy
from ksana.engine.assembly import assemble
from ksana.engine.core import EngineCore
from ksana.engine.keywords import configure
from ksana.markers import hookimpl
from ksana.testing.tiny_models import tiny_model
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [7 + i % 90 for i in range(70)]


class HostBlocks:
    """A plugin whose connector can be looked into. Loads take more than the step."""

    store: MemoryStore

    @hookimpl
    def ksana_kv_connector_names(self) -> list[str]:
        return ["watched"]

    @hookimpl
    def ksana_create_kv_connector(self, name: str, context: ConnectorContext) -> StoreConnector | None:
        if name != "watched":
            return None
        self.store = MemoryStore(2**24, max(group.spec.bytes_per_block for group in context.kv.groups))
        return StoreConnector(self.store, context.namespace, context.kv, StorePolicy("host"), threads=1)


@pytest.fixture
def host() -> HostBlocks:
    return HostBlocks()


@pytest.fixture
def core(host: HostBlocks, tmp_path: Path) -> Iterator[EngineCore]:
    """An engine whose host blocks have the prompt, and whose cache has not."""
    config, plugins = configure(
        "test", tiny_model(tmp_path), {"num_blocks": 12, "preempt_mode": "recompute", "launch_block_threshold": 1}
    )
    plugins.register(host)
    core = assemble(config, plugins).core
    core.add(request("first"))
    run(core)
    core.scheduler.kv.reset_prefix_cache()
    yield core
    core.close()


def request(name: str, max_total_tokens: int = 80) -> Request:
    return Request(name, PROMPT, GREEDY, max_total_tokens=max_total_tokens)


def run(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def finish(core: EngineCore) -> None:
    run(core)


def abort_at_once(core: EngineCore) -> None:
    core.abort("second")
    run(core)


def abort_while_loading(core: EngineCore) -> None:
    core.step()
    core.abort("second")
    run(core)


def hit_in_the_cache(core: EngineCore) -> None:
    """Another request has put the prompt into the cache while this one waited."""
    core.step()
    core.add(request("third"))
    run(core)
    core.add(request("fourth"))
    run(core)
    assert core.stats.snapshot().load_failures == 0


def preempted(core: EngineCore) -> None:
    """Two that fill the cache: the later one gives way."""
    core.add(request("third", 150))
    core.add(request("fourth", 150))
    run(core)
    assert core.stats.snapshot().preemptions > 0


@pytest.mark.parametrize("end", [finish, abort_at_once, abort_while_loading, hit_in_the_cache, preempted])
def test_whatever_becomes_of_a_request_nothing_stays_pinned(
    core: EngineCore, host: HostBlocks, end: Callable[[EngineCore], None]
) -> None:
    core.add(request("second"))
    assert core.scheduler.transfers is not None
    for _ in range(3):  # lookups alone pin nothing
        hit = core.scheduler.kv.find_prefix(core.scheduler.requests["second"])
        assert core.scheduler.transfers.lookup(core.scheduler.requests["second"], hit.num_tokens)
    assert host.store.num_pins == 0
    end(core)
    assert not core.scheduler.requests
    assert host.store.num_pins == 0
    assert core.scheduler.kv.usage == 0.0
