"""Whatever happens to the store, nobody waits for it for long, and it is used again when it is back."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ksana.testing.waiting import wait_until
from ksana_mooncake import connection
from ksana_mooncake.client import INVALID, RPC_FAILED, TRANSFER_FAILED, StoreClient
from ksana_mooncake.master import LocalMaster
from ksana_mooncake.mock_client import MockClient, MockMaster
from ksana_mooncake.mooncake_client import MooncakeClient
from ksana_mooncake.options import GlobalCacheOptions
from ksana_mooncake.store import MooncakeStore

Blocks = list[list[np.ndarray]]
Open = Callable[..., MooncakeStore]
Make = Callable[..., Blocks]
Count = Callable[[MooncakeStore, list[str]], int]
OwnMaster = tuple[LocalMaster, GlobalCacheOptions]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first new tries come at once."""
    monkeypatch.setattr(connection, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def client(own_mock: GlobalCacheOptions) -> MockClient:
    return MockClient(own_mock)


@pytest.fixture
def store(own_mock: GlobalCacheOptions, open_store: Open, client: MockClient) -> MooncakeStore:
    return open_store(own_mock, lambda: client)


def test_an_outage_is_told_once_and_ends(
    store: MooncakeStore,
    client: MockClient,
    keys: list[str],
    make_blocks: Make,
    count_stored: Count,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = make_blocks(4)
    store.put(keys, blocks)
    client.is_down = True
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert store.get(keys, blocks) == [False] * 4
            assert store.put(keys, blocks) == [False] * 4
            assert store.contains(keys) == 0
        client.is_down = False
        wait_until(lambda: store.is_up)
        assert all(store.put(keys, blocks))
    assert count_stored(store, keys) == 4
    messages = [record.getMessage() for record in caplog.records]
    assert sum("is out of reach" in message for message in messages) == 1
    assert sum("works again" in message for message in messages) == 1


def test_a_master_that_has_forgotten_everything_is_believed(
    store: MooncakeStore,
    client: MockClient,
    keys: list[str],
    make_blocks: Make,
    count_stored: Count,
) -> None:
    store.put(keys, make_blocks(4))
    client.is_down = True
    store.get(keys, make_blocks(4))
    client.master.restart()
    client.is_down = False
    wait_until(lambda: store.is_up)
    assert count_stored(store, keys) == 0


@pytest.mark.parametrize("code", [RPC_FAILED, TRANSFER_FAILED])
def test_the_first_failure_keeps_everybody_off(
    own_mock: GlobalCacheOptions, open_store: Open, make_blocks: Make, code: int
) -> None:
    """Each call of a store whose master is gone would take four seconds."""
    calls = []

    class Failing(MockClient):
        def get(self, keys, addresses, sizes):  # type: ignore[no-untyped-def]
            calls.append(list(keys))
            return [code] * len(keys)

        def exists(self, keys):  # type: ignore[no-untyped-def]
            return [code] * len(keys)

    store = open_store(own_mock, lambda: Failing(own_mock))
    many = [str(number) for number in range(200)]
    assert not any(store.get(many, make_blocks(200)))
    assert len(calls) == 1
    assert not store.is_up
    assert store.contains(many) == 0


def test_waiting_grows_until_a_block_has_moved() -> None:
    """A master that answers, while nothing can be moved, is not asked four times a second for ever."""
    now: list[StoreClient] = []
    waits = []

    class Recording(connection.Backoff):
        def take(self) -> float:
            waits.append(self._next_s)
            super().take()
            return 0.0

    class Alive(MockClient):
        def __init__(self) -> None:
            now.append(self)

        def connect(self) -> int:
            return 0

        def exists(self, keys):  # type: ignore[no-untyped-def]
            return [0] * len(keys)

        def is_reachable(self) -> bool:
            return True

        def close(self) -> None:
            pass

    under_test = connection.Connection(Alive, "test", lambda: None)
    under_test._backoff = Recording(1.0, 4.0)
    under_test.start()
    for _ in range(4):
        wait_until(lambda: under_test.is_up)
        under_test.report([TRANSFER_FAILED])
    wait_until(lambda: under_test.is_up)
    under_test.report_transfer([TRANSFER_FAILED, 0])
    under_test.report([TRANSFER_FAILED])
    under_test.close()
    assert waits[:5] == [1.0, 2.0, 4.0, 4.0, 1.0]


def test_a_store_that_cannot_be_reached_at_the_start_is_joined_later(
    own_mock: GlobalCacheOptions,
    keys: list[str],
    make_blocks: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = MockClient(own_mock)
    client.is_down = True
    store = MooncakeStore(own_mock, lambda: client, block_bytes=192, key_prefix="")
    assert store.contains(keys) == 0
    assert store.put(keys, make_blocks(4)) == [False] * 4
    wait_until(lambda: "out of reach" in caplog.text)
    client.is_down = False
    wait_until(lambda: store.is_up)
    assert all(store.put(keys, make_blocks(4)))
    store.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (INVALID, "Mooncake's error -600, invalid parameters"),
        (TypeError("setup(): incompatible function arguments.\nand more"), "setup(): incompatible function arguments."),
    ],
)
def test_what_the_store_refuses_again_and_again_is_not_asked_for_ever(
    own_mock: GlobalCacheOptions, caplog: pytest.LogCaptureFixture, answer: int | Exception, reason: str
) -> None:
    tries = []

    class Refused(MockClient):
        def connect(self) -> int:
            tries.append(answer)
            if isinstance(answer, Exception):
                raise answer
            return answer

    store = MooncakeStore(own_mock, lambda: Refused(own_mock), block_bytes=192, key_prefix="")
    wait_until(lambda: not store._connection._thread.is_alive())
    assert len(tries) == connection._TRIES_BEFORE_COMPLAINT
    [message] = [record.getMessage() for record in caplog.records]
    assert f"is switched off until the next start: {reason}" in message
    store.close()


def test_a_try_that_holds_up_everybody_is_not_repeated_soon(
    own_mock: GlobalCacheOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SLOW_TRY_S", -1.0)
    waits = []

    class Recording(connection.Backoff):
        def take(self) -> float:
            waits.append(super().take())
            return 0.01

    monkeypatch.setattr(connection, "Backoff", Recording)
    client = MockClient(own_mock)
    client.is_down = True
    store = MooncakeStore(own_mock, lambda: client, block_bytes=192, key_prefix="")
    wait_until(lambda: waits)
    assert waits[0] == connection._LONGEST_WAIT_S
    assert "is out of reach (Mooncake's error -900, the call to the master has failed;" in caplog.text
    store.close()


def test_nobody_waits_for_a_master_that_does_not_answer_to_leave_it(
    own_mock: GlobalCacheOptions, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake would wait a quarter of a minute, and let nothing else run meanwhile."""
    monkeypatch.setattr(connection, "_LONGEST_WAIT_S", 0.01)
    left = threading.Event()

    class Leaving(MockClient):
        def close(self) -> None:
            assert not self.is_down
            left.set()

    client = Leaving(own_mock)
    store = open_store(own_mock, lambda: client)
    client.is_down = True
    store.close()
    assert not left.is_set()
    client.is_down = False
    left.wait()


def test_memory_is_registered_with_every_new_client(own_mock: GlobalCacheOptions) -> None:
    """RDMA refuses memory that its client has not heard of."""
    registered: list[tuple[int, int]] = []

    class Refusing(MockClient):
        refusals = 2

        def connect(self) -> int:
            Refusing.refusals -= 1
            return RPC_FAILED if Refusing.refusals >= 0 else super().connect()

        def register(self, address: int, size: int) -> int:
            registered.append((address, size))
            return 0

    store = MooncakeStore(own_mock, lambda: Refusing(own_mock), block_bytes=192, key_prefix="")
    store.register(1, 100)
    wait_until(lambda: store.is_up)
    store.register(2, 200)
    assert {(1, 100), (2, 200)} <= set(registered)
    assert len(registered) == 4
    store.close()


def test_a_store_that_hangs_delays_nobody(
    own_mock: GlobalCacheOptions, open_store: Open, client: MockClient, keys: list[str], make_blocks: Make
) -> None:
    """The engine's thread asks, and hears that nothing is known, then that nothing is there."""
    store = open_store(replace(own_mock, timeout_s=0.3), lambda: client)
    store.put(keys[:1], make_blocks(1))
    client.delay_s = 1.0
    answers = []
    wait_until(lambda: answers.append(store.contains(keys)) or answers[-1] is not None)
    assert answers[0] is None
    assert answers[-1] == 1


def test_a_master_that_is_killed_in_the_middle_of_loads(
    own_master: OwnMaster,
    open_store: Open,
    keys: list[str],
    make_blocks: Make,
    count_stored: Count,
) -> None:
    """Every load ends, and what came is right; the next master works, and knows nothing."""
    master, options = own_master
    store = open_store(options)
    many = [f"{keys[0]}{number}" for number in range(300)]
    content = np.array(make_blocks(300))  # [block, layer, byte]
    assert all(store.put(many, [list(block) for block in content]))
    results: list[tuple[np.ndarray, np.ndarray]] = []

    def load() -> None:
        for _ in range(20):
            received = np.zeros_like(content)
            loaded = store.get(many, [list(block) for block in received])
            results.append((np.array(loaded), received))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(results) > 5)
    first = master.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(results) == 60
    assert results[0][0].all()
    assert not results[-1][0].any()
    for loaded, received in results:
        assert np.array_equal(received[loaded], content[loaded])
    wait_until(lambda: master.pid not in (None, first) and store.is_up)
    wait_until(lambda: all(store.put(keys, make_blocks(4))))
    assert count_stored(store, many) == 0
    assert all(store.get(keys, make_blocks(4)))


def test_a_master_that_hangs_is_given_up(
    own_master: OwnMaster, open_store: Open, keys: list[str], make_blocks: Make
) -> None:
    master, options = own_master
    store = open_store(options)
    assert all(store.put(keys, make_blocks(4)))
    assert master.pid is not None
    os.kill(master.pid, signal.SIGSTOP)
    # A thread that is computing answers until it is interrupted.
    stats = Path(f"/proc/{master.pid}/task")
    wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats.glob("*/stat")))
    try:
        assert not any(store.get(keys, make_blocks(4)))
        assert not store.is_up
        assert not any(store.put(keys, make_blocks(4)))
        # To join it would hold up the whole process for five seconds.
        with pytest.raises(ConnectionError, match="its master does not answer"):
            MooncakeClient(options).connect()
    finally:
        os.kill(master.pid, signal.SIGCONT)
    wait_until(lambda: store.is_up)
    wait_until(lambda: all(store.get(keys, make_blocks(4))))


def test_it_is_said_who_does_not_answer(real_master: GlobalCacheOptions, free_port: Callable[[], int]) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    client = MooncakeClient(replace(real_master, metadata_server=f"http://me:hush@{nobody}/metadata"))
    wait_until(client.is_reachable)
    with pytest.raises(ConnectionError, match=f"nobody answers at {nobody}, where --mooncake-service-endpoint points"):
        client.connect()


def test_masters_of_two_addresses_have_nothing_in_common() -> None:
    assert MockMaster.at("a:1") is not MockMaster.at("a:2")
    assert MockMaster.at("a:1") is MockMaster.at("a:1")
