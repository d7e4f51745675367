"""Lookups never make anybody wait, and are true as long as they are believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from ksana.testing.waiting import wait_until
from ksana_mooncake import lookups as module
from ksana_mooncake.lookups import Lookups


class Store:
    """What is asked: the keys that it has, and the questions that came."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.questions: list[list[str]] = []
        self.answers = threading.Event()
        self.answers.set()

    def ask(self, keys: Sequence[str]) -> list[bool]:
        self.questions.append(list(keys))
        self.answers.wait(60)
        return [key in self.keys for key in keys]


@pytest.fixture
def open_lookups() -> Iterator[Callable[..., Lookups]]:
    opened: list[tuple[Lookups, Store]] = []

    def start(store: Store, timeout_s: float = 60.0) -> Lookups:
        opened.append((Lookups(store.ask, timeout_s), store))
        return opened[-1][0]

    yield start
    for lookups, store in opened:
        store.answers.set()
        lookups.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, to be changed by the test."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def found(lookups: Lookups, keys: list[str]) -> int:
    while (count := lookups.count(keys)) is None:
        time.sleep(0.001)
    return count


def test_the_first_question_is_answered_later(open_lookups: Callable[..., Lookups]) -> None:
    store = Store("a", "b")
    store.answers.clear()
    lookups = open_lookups(store)
    assert [lookups.count(["a", "b", "c"]) for _ in range(3)] == [None] * 3
    store.answers.set()
    assert found(lookups, ["a", "b", "c"]) == 2
    assert found(lookups, ["a"]) == 1
    assert store.questions == [["a", "b", "c"]]


def test_behind_a_missing_block_nothing_is_asked_for(open_lookups: Callable[..., Lookups]) -> None:
    """A cold prompt of 100,000 tokens costs one question."""
    keys = [str(number) for number in range(6000)]
    store = Store(*keys[:300])
    lookups = open_lookups(store)
    assert found(lookups, keys) == 300
    assert sum(map(len, store.questions)) == 512


def test_what_is_not_answered_in_time_is_missing(open_lookups: Callable[..., Lookups], clock: list[float]) -> None:
    store = Store("a", "b")
    lookups = open_lookups(store, timeout_s=2.0)
    lookups.learn(["a"], [True])
    store.answers.clear()
    assert lookups.count(["a", "b"]) is None
    wait_until(lambda: store.questions == [["b"]])
    clock[0] += 1.9
    assert lookups.count(["a", "b"]) is None
    clock[0] += 0.2
    assert lookups.count(["a", "b"]) == 1
    assert len(store.questions) == 1
    store.answers.set()
    wait_until(lambda: lookups.count(["a", "b"]) == 2)


@pytest.mark.parametrize("is_stored", [True, False])
def test_answers_are_believed_for_a_while_after_they_were_heard(
    open_lookups: Callable[..., Lookups], clock: list[float], is_stored: bool
) -> None:
    """A step may take longer than an answer is good for; who has asked must hear it all the same."""
    store = Store(*(["a"] if is_stored else []))
    lookups = open_lookups(store)
    assert lookups.count(["a"]) is None
    wait_until(lambda: lookups._answers)
    clock[0] += 20.0
    assert lookups.count(["a"]) == int(is_stored)
    clock[0] += 0.9
    assert lookups.count(["a"]) == int(is_stored)
    clock[0] += 5.0
    store.keys = set() if is_stored else {"a"}
    assert lookups.count(["a"]) is None
    assert found(lookups, ["a"]) == int(not is_stored)


def test_an_answer_that_nobody_came_for_is_not_kept_for_ever(
    open_lookups: Callable[..., Lookups], clock: list[float]
) -> None:
    store = Store("a")
    lookups = open_lookups(store)
    found(lookups, ["a"])
    clock[0] += 3600.0
    assert lookups.count(["a"]) is None


def test_what_shows_without_asking_is_believed(open_lookups: Callable[..., Lookups]) -> None:
    store = Store("a")
    lookups = open_lookups(store)
    assert found(lookups, ["a"]) == 1
    lookups.learn(["a"], [False])
    assert lookups.count(["a"]) == 0
    lookups.learn(["a", "b"], [True, True])
    assert lookups.count(["a", "b"]) == 2
    lookups.forget()
    assert lookups.count(["a"]) is None


def test_what_is_forgotten_is_not_learnt_from_an_answer_to_an_older_question(
    open_lookups: Callable[..., Lookups],
) -> None:
    """The store is cleared while it is asked."""
    store = Store("a")
    store.answers.clear()
    lookups = open_lookups(store)
    assert lookups.count(["a"]) is None
    wait_until(lambda: store.questions)
    lookups.forget()
    store.answers.set()
    wait_until(lambda: not lookups._deadlines)
    store.keys.clear()
    assert found(lookups, ["a"]) == 0


def test_a_question_that_fails_leaves_the_others(
    open_lookups: Callable[..., Lookups], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Store):
        def ask(self, keys: Sequence[str]) -> list[bool]:
            if keys[0] == "bad":
                raise RuntimeError("out of order")
            return super().ask(keys)

    lookups = open_lookups(Broken("a"), timeout_s=0.2)
    assert found(lookups, ["bad"]) == 0
    assert found(lookups, ["a"]) == 1
    assert "out of order" in caplog.text
    assert not lookups._deadlines, "a key whose question has failed could never be asked for again"


def test_memory_is_bounded(open_lookups: Callable[..., Lookups], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ANSWERS", 100)
    store = Store()
    lookups = open_lookups(store)
    for number in range(500):
        assert found(lookups, [str(number)]) == 0
    assert len(lookups._answers) == 100
    assert not lookups._deadlines
