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
