"""What the model runner calls of a KV connector, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ksana.connectors.base import WorkerConnector
from ksana.types.kv_transfer import ConnectorMetadata
from ksana.types.step import SchedulerOutput


class Recorder(WorkerConnector):
    """Writes down what it is called for."""

    def __init__(self, is_layerwise: bool) -> None:
        self.calls: list[str] = []
        self._is_layerwise = is_layerwise

    @property
    def is_layerwise(self) -> bool:
        return self._is_layerwise

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        self.calls.append("preemptions")

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        self.calls.append("start")

    def wait_for_layer_load(self, layer_index: int) -> None:
        self.calls.append(f"load {layer_index}")

    def save_kv_layer(self, layer_index: int) -> None:
        self.calls.append(f"save {layer_index}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def get_finished(self) -> tuple[set[str], set[str]]:
        self.calls.append("finished")
        return {"a"}, {"b"}


@pytest.mark.parametrize(
    ("is_layerwise", "inner"), [(True, ["load 0", "save 0", "load 1", "save 1"]), (False, ["load 1"])]
)
def test_calls_in_a_step_and_the_same_logits(
    make_engine: Callable[..., Any], is_layerwise: bool, inner: list[str]
) -> None:
    plain, watched = make_engine(), make_engine()
    recorder = watched.runner._connector = Recorder(is_layerwise)
    logits = []
    for engine in (plain, watched):
        engine.add([5, 6, 7, 8, 9])
        step = engine.scheduler.schedule()
        if engine is watched:
            step.connector_metadata = ConnectorMetadata()
        output = engine.runner.execute(step)
        logits.append(engine.model.logits)
    assert recorder.calls == ["preemptions", "start", *inner, "saved", "finished"]
    assert (output.kv_connector_output.finished_sending, output.kv_connector_output.finished_receiving) == (
        {"a"},
        {"b"},
    )
    assert torch.equal(*logits)


def test_a_step_that_only_asks(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    recorder = engine.runner._connector = Recorder(False)
    engine.runner.execute(SchedulerOutput(polls_connector=True))
    assert recorder.calls == ["finished"]


@pytest.mark.parametrize("is_layerwise", [True, False])
def test_a_step_that_fails_leaves_nobody_at_its_blocks(make_engine: Callable[..., Any], is_layerwise: bool) -> None:
    """What it loads would go on being written into blocks that have other owners by then."""
    engine = make_engine()
    recorder = engine.runner._connector = Recorder(is_layerwise)
    engine.add([5, 6, 7, 8, 9])
    step = engine.scheduler.schedule()
    step.connector_metadata = ConnectorMetadata()

    def fail(inputs: object, context: object) -> None:
        raise MemoryError("planted")

    engine.model.forward = fail
    with pytest.raises(MemoryError):
        engine.runner.execute(step)
    assert recorder.calls[-2:] == ["load 1", "saved"]


class Overwriter(Recorder):
    """Loads into a block as soon as it may."""

    def __init__(self, block: torch.Tensor) -> None:
        super().__init__(is_layerwise=False)
        self._block = block

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        self._block.fill_(0)


def test_shared_blocks_are_copied_before_a_load_may_write_to_them(make_engine: Callable[..., Any]) -> None:
    """Whoever shared one no longer does, so it may be free, and filled with what another request waits for."""
    engine = make_engine()
    tensor = engine.runner._cache.group_tensors(0)[0]
    tensor[1].fill_(7)
    engine.runner._connector = Overwriter(tensor[1])
    engine.runner.execute(SchedulerOutput(block_copies=[(0, 1, 2)], connector_metadata=ConnectorMetadata()))
    assert torch.equal(tensor[2], torch.full_like(tensor[2], 7))
