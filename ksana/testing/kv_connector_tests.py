"""Conformance kit for KV connectors. Needs pytest.

Subclass :class:`KVConnectorTests` in a test module of your plugin and make your connector in it::

    class TestMyConnector(KVConnectorTests):
        @pytest.fixture
        def make_connector(self, tmp_path):
            return lambda context: MyConnector(tmp_path, context.namespace, context.kv)

The tests use the interface alone. How the core calls it, :class:`~ksana.testing.kv_connector_engine.ConnectorEngine`
shows in a few lines.
"""

from __future__ import annotations

import gc
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest

from ksana.connectors.base import KVConnector
from ksana.connectors.block_store import BlockNamespace, describe_model
from ksana.connectors.context import ConnectorContext
from ksana.testing.kv_connector_engine import ConnectorEngine, make_connector_cache
from ksana.types.config import KsanaConfig
from ksana.types.kv import KVCacheConfig
from ksana.types.model import ModelConfig, RopeConfig
from ksana.types.request import RequestStatus

MakeConnector = Callable[[ConnectorContext], KVConnector]
MakeEngine = Callable[..., ConnectorEngine]

_WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full attention": (None,),
    "a window beside it": (None, 8),
    "two windows": (None, 6, 13),
    "a window alone": (9,),
}
_SHUTDOWN_S = 10.0


def connector_context(kv: KVCacheConfig, config: KsanaConfig | None = None, weights: str = "") -> ConnectorContext:
    """What the core tells a connector about an engine of that cache, for a model that does not exist."""
    model = ModelConfig(
        "LlamaForCausalLM", "kit", 100, 32, 64, 2, 2, 2, 8, 1000, kv.groups[0].spec.dtype, 1e-6, RopeConfig(), False
    )
    namespace = BlockNamespace(describe_model(model, kv, weights), "plain")
    return ConnectorContext(config or KsanaConfig(), model, kv, namespace)


class KVConnectorTests:
    """What every KV connector must do. Override :meth:`make_connector`, and what else is different with yours.

    Attributes:
        shares_store: connectors of one test find each other's blocks. If not, tests of that are skipped.
        can_swap: it keeps what requests had that are swapped out.
    """

    shares_store = True
    can_swap = False

    @pytest.fixture
    def make_connector(self) -> MakeConnector:
        """Makes connectors for a context. Those of one test may share a store; those of two tests do not."""
        raise NotImplementedError("give the kit your connector")

    def count_pins(self, connector: KVConnector) -> int:
        """How many blocks your store keeps because of loads to come; 0 if it makes no such promise."""
        del connector
        return 0

    def lose_blocks(self, connector: KVConnector) -> None:
        """Have all stored blocks vanish, or be damaged, behind the connector's back, so that loads fail."""
        del connector
        pytest.skip("this connector's store cannot be broken")

    @pytest.fixture
    def make_engine(self, make_connector: MakeConnector) -> Iterator[MakeEngine]:
        """Engines around connectors of their own; stopped at the end."""
        engines = []

        def make(*windows: int | None, dtype: str = "float32", weights: str = "") -> ConnectorEngine:
            kv = make_connector_cache(windows or (None,), dtype=dtype)
            engine = ConnectorEngine(make_connector(connector_context(kv, weights=weights)), kv)
            engines.append(engine)
            return engine

        yield make
        for engine in engines:
            engine.close()

    # -- content -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("windows", _WINDOWS.values(), ids=_WINDOWS.keys())
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    def test_blocks_come_back_bit_for_bit(
        self, make_engine: MakeEngine, windows: tuple[int | None, ...], dtype: str
    ) -> None:
        engine = make_engine(*windows, dtype=dtype)
        assert engine.run(engine.request(range(30))) == 0
        engine.overwrite_free_blocks()
        again = engine.request(range(30))
        assert engine.load(again) == 28
        assert engine.invalid == set()
        assert engine.wrong_blocks(again, 28) == set()

    def test_what_one_engine_has_stored_another_finds(self, make_engine: MakeEngine) -> None:
        if not self.shares_store:
            pytest.skip("every engine has a store of its own")
        first, second = make_engine(None, 8), make_engine(None, 8)
        first.run(first.request(range(25)))
        request = second.request(range(25))
        assert second.load(request) == 24
        assert second.wrong_blocks(request, 24) == set()

    def test_another_model_finds_nothing(self, make_engine: MakeEngine) -> None:
        first, second = make_engine(weights="of one model"), make_engine(weights="of another")
        first.run(first.request(range(25)))
        assert second.lookup(second.request(range(25))) == 0
        assert first.lookup(first.request(range(25))) == 24

    def test_another_salt_finds_nothing(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(25), cache_salt="a"))
        assert engine.lookup(engine.request(range(25), cache_salt="b")) == 0
        assert engine.lookup(engine.request(range(25))) == 0

    def test_the_common_beginning_of_two_prompts_is_found(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(30)))
        other = engine.request([*range(17), *range(50, 70)])
        assert engine.load(other) == 16
        assert engine.wrong_blocks(other, 16) == set()

    def test_generated_tokens_are_saved_as_blocks_become_full(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        request = engine.request(range(10))
        request.all_token_ids.extend(range(10, 30))  # blocks for what is to come
        engine.admit(request)
        del request.all_token_ids[10:]
        for token in range(10, 22):
            engine.step(request)
            request.all_token_ids.append(token)
        engine.settle()
        assert engine.lookup(engine.request(range(30))) == 20
        engine.step(request)
        engine.finish(request)
        engine.settle()
        assert engine.lookup(engine.request(range(30))) == 20

    # -- lookups -----------------------------------------------------------------------------------------------

    def test_a_lookup_changes_nothing(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(30)))
        request = engine.request(range(30))
        assert [engine.lookup(request) for _ in range(5)] == [28] * 5
        assert self.count_pins(engine.connector) == 0
        engine.settle()
        assert not engine.finish(request, RequestStatus.FINISHED_ABORTED)

    def test_a_token_is_left_to_compute(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(32)))
        assert engine.lookup(engine.request(range(32))) == 28
        assert engine.lookup(engine.request(range(33))) == 32

    def test_no_more_is_offered_than_may_be_cached(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(32)))
        request = engine.request(range(32))
        request.max_cached_tokens = 14
        assert engine.lookup(request) == 12

    @pytest.mark.parametrize("num_computed", [0, 12, 16, 20])
    def test_what_the_cache_has_is_not_offered(self, make_engine: MakeEngine, num_computed: int) -> None:
        """LMCache#2158: a local hit beyond the stored blocks gave a negative number."""
        engine = make_engine()
        engine.run(engine.request(range(17)))
        request = engine.request(range(40))
        assert engine.load(request, num_computed) == max(0, 16 - num_computed)
        assert engine.wrong_blocks(request, max(16, num_computed)) == set()

    def test_reset_forgets_everything(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.run(engine.request(range(30)))
        engine.scheduler.reset_cache()
        engine.settle()
        assert engine.lookup(engine.request(range(30))) == 0
        engine.run(engine.request(range(30)))
        assert engine.lookup(engine.request(range(30))) == 28

    # -- failures ----------------------------------------------------------------------------------------------

    def test_blocks_that_cannot_be_loaded_are_reported(self, make_engine: MakeEngine) -> None:
        engine = make_engine(None, 8)
        engine.run(engine.request(range(30)))
        engine.overwrite_free_blocks()
        request = engine.request(range(30))
        assert engine.lookup(request) == 28
        self.lose_blocks(engine.connector)
        engine.admit(request, 28)
        engine.wait_for_load(request)
        assert engine.invalid
        assert engine.wrong_blocks(request, 28) <= engine.invalid
        engine.finish(request)
        engine.settle()
        assert self.count_pins(engine.connector) == 0

    @pytest.mark.parametrize("state", ["looked up", "admitted", "loading", "loaded", "computed", "swapped"])
    def test_an_abort_in_any_state_gives_everything_back(self, make_engine: MakeEngine, state: str) -> None:
        """LMCache#1034: what a lookup had pinned was never released."""
        engine = make_engine(None, 8)
        engine.run(engine.request(range(30)))
        request = engine.request(range(40))
        num_found = engine.lookup(request)
        if state != "looked up":
            engine.admit(request, num_found)
        if state == "loading":
            engine.step()
        if state in ("loaded", "computed", "swapped"):
            engine.wait_for_load(request)
            request.num_computed_tokens = num_found
        if state in ("computed", "swapped"):
            engine.step(request)
            request.all_token_ids.append(1)
            engine.step(request)
        if state == "swapped" and not engine.swap_out(request):
            assert not self.can_swap
            pytest.skip("this connector keeps nothing of requests that lose their blocks")
        engine.finish(request, RequestStatus.FINISHED_ABORTED)
        engine.settle()
        assert self.count_pins(engine.connector) == 0
        assert engine.sent.count(request.request_id) <= 1
        assert engine.load(engine.request(range(40))) >= 28

    def test_a_preempted_request_is_read_no_more(self, make_engine: MakeEngine) -> None:
        """LMCache#4955: a save read blocks that had a new owner."""
        engine = make_engine(None, 8)
        for start in range(0, 1000, 50):
            request = engine.request(range(start, start + 40))
            engine.load(request)
            engine.step(request)
            request.all_token_ids.append(1)
            engine.step(request)  # saves of what the step before has computed begin
            engine.preempt(request)
            engine.step(overwrites=True)
            again = engine.request(range(start, start + 40))
            num_found = engine.load(again)
            assert engine.wrong_blocks(again, num_found) == set()
            engine.finish(again)
            engine.finish(request)
            engine.settle()

    def test_blocks_that_are_kept_are_reported_once(self, make_engine: MakeEngine) -> None:
        engine = make_engine(None, 8)
        kept = []
        for start in range(0, 1000, 50):
            request = engine.request(range(start, start + 40))
            engine.load(request)
            engine.step(request)
            if engine.finish(request):
                kept.append(request.request_id)
            if start % 200 == 0:
                engine.settle()  # before the cache is full of blocks that are kept
        engine.settle()
        engine.step()
        assert sorted(engine.sent) == sorted(kept)

    def test_a_step_that_fails_is_made_up_for(self, make_engine: MakeEngine) -> None:
        """The core ends what was computed in it; what waits for the connector goes on."""
        engine = make_engine()
        engine.run(engine.request(range(30)))
        computed, waiting = engine.request(range(100, 130)), engine.request(range(40))
        engine.load(computed)
        engine.step(computed)
        num_found = engine.lookup(waiting)
        engine.admit(waiting, num_found)
        computed.all_token_ids.append(1)
        engine.step(computed, is_lost=True)
        engine.finish(computed, RequestStatus.FINISHED_ERROR)
        if not engine.is_loading(waiting):  # it ran in that step, so it has failed as well
            engine.finish(waiting, RequestStatus.FINISHED_ERROR)
        engine.settle()
        assert self.count_pins(engine.connector) == 0
        engine.overwrite_free_blocks()
        again = engine.request(range(40))
        assert engine.load(again) == 28
        assert engine.wrong_blocks(again, 28) == set()

    def test_a_step_that_raises_leaves_nobody_at_its_blocks(self, make_engine: MakeEngine) -> None:
        """They have other owners at once, who may not wait for anything."""
        engine = make_engine()
        engine.run(engine.request(range(200)))
        request = engine.request(range(210))
        engine.admit(request, engine.lookup(request))
        engine.step(request, raises=True)
        is_loading = engine.is_loading(request)
        engine.finish(request, RequestStatus.FINISHED_ERROR)
        engine.overwrite_free_blocks()
        engine.settle()
        assert is_loading or engine.written_free_blocks() == set()
        assert self.count_pins(engine.connector) == 0
        again = engine.request(range(210))
        assert engine.load(again) == 200
        assert engine.wrong_blocks(again, 200) == set()

    # -- swapping ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("windows", _WINDOWS.values(), ids=_WINDOWS.keys())
    def test_a_swapped_request_gets_all_its_tokens_back(
        self, make_engine: MakeEngine, windows: tuple[int | None, ...]
    ) -> None:
        engine = make_engine(*windows)
        request = engine.request(range(30))
        engine.load(request)
        engine.step(request)
        request.all_token_ids.append(1)
        if not engine.swap_out(request):
            assert not self.can_swap
            pytest.skip("this connector keeps nothing of requests that lose their blocks")
        engine.settle()
        assert engine.sent == [request.request_id]
        engine.overwrite_free_blocks()
        assert engine.load(request, num_computed_tokens=8) == 22
        assert engine.wrong_blocks(request, 30) == set()
        assert engine.scheduler.get_num_new_matched_tokens(request, 30)[0] == 0
        engine.finish(request)
        engine.settle()
        assert self.count_pins(engine.connector) == 0

    # -- the long run ------------------------------------------------------------------------------------------

    def test_a_thousand_requests_leave_nothing_behind(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        tokens = [range(1000 * kind, 1000 * kind + 20) for kind in range(10)]
        for number in range(100):
            engine.run(engine.request(tokens[number % 10]))
        before = _num_objects(engine)
        for number in range(1000):
            request = engine.request(tokens[number % 10])
            if number % 3 == 0:
                engine.run(request)
            else:
                engine.lookup(request)
                engine.finish(request, RequestStatus.FINISHED_ABORTED)
        engine.settle()
        assert _num_objects(engine) < before + 200

    def test_shutdown_does_not_wait_for_transfers(self, make_connector: MakeConnector) -> None:
        threads = set(threading.enumerate())
        kv = make_connector_cache((None,))
        engine = ConnectorEngine(make_connector(connector_context(kv)), kv)
        requests = [engine.request(range(100 * number, 100 * number + 30)) for number in range(5)]
        for request in requests:
            engine.load(request)
        engine.step(*requests)
        for request in requests:
            engine.finish(request)
        engine.step()
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < _SHUTDOWN_S
        assert [thread for thread in set(threading.enumerate()) - threads if not thread.daemon] == []


def _num_objects(engine: ConnectorEngine) -> int:
    """Objects that can be reached from the two sides of its connector, but for code."""
    found: list[object] = [engine.scheduler, engine.worker]
    seen = {id(engine), *map(id, found)}
    for current in found:
        keys = list(current) if isinstance(current, dict) else []  # the collector does not look at those that are text
        for value in gc.get_referents(current) + keys:
            if id(value) not in seen and not isinstance(value, (type, types.ModuleType, types.FunctionType)):
                seen.add(id(value))
                found.append(value)
    return len(found)
