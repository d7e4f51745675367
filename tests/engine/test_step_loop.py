"""When the engine's thread begins a step: with all of a burst, and without waiting for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ksana.engine import step_loop
from ksana.engine.step_loop import StepLoop

DEADLINE_S = 30


class Core:
    """Notes in each step which commands have come."""

    only_transfers = False

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.steps: list[list[str]] = []
        self.stepped = threading.Event()

    def has_work(self) -> bool:
        return bool(self.commands) and not self.steps

    def step(self) -> list[Any]:
        self.steps.append(list(self.commands))
        self.stepped.set()
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def loop(core: Core) -> Iterator[StepLoop]:
    loop = StepLoop(lambda: SimpleNamespace(core=core, context=None))  # type: ignore[arg-type, return-value]
    loop.start()
    loop.serve(lambda deltas: None, lambda error: None)
    yield loop
    loop.stop()


def command(name: str, then: Callable[[], object] = lambda: None) -> Callable[[Any], None]:
    def run(core: Core) -> None:
        core.commands.append(name)
        then()

    return run


def post_two(loop: StepLoop, then: Callable[[], object]) -> None:
    """Both are there when the thread looks."""
    both = threading.Event()
    loop.post(command("first", lambda: both.wait(DEADLINE_S)))
    loop.post(command("second", then))
    both.set()


def test_a_step_has_all_of_a_burst(core: Core, loop: StepLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_BURST_GAP_S", 1.0)
    monkeypatch.setattr(step_loop, "_BURST_S", DEADLINE_S)
    post_two(loop, threading.Timer(0.05, lambda: loop.post(command("third"))).start)
    assert core.stepped.wait(DEADLINE_S)
    assert core.steps == [["first", "second", "third"]]


def test_one_alone_waits_for_nobody(core: Core, loop: StepLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_BURST_GAP_S", 1000.0)
    monkeypatch.setattr(step_loop, "_BURST_S", 1000.0)
    loop.post(command("first"))
    assert core.stepped.wait(DEADLINE_S)


def test_a_burst_without_end_does_not_hold_a_step_up(
    core: Core, loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_BURST_GAP_S", 1000.0)
    monkeypatch.setattr(step_loop, "_BURST_S", 0.3)

    def go_on() -> None:
        if not core.steps:
            threading.Timer(0.01, lambda: loop.post(command("another", go_on))).start()

    post_two(loop, go_on)
    assert core.stepped.wait(DEADLINE_S)
