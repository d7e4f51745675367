"""The publisher against a real NATS server, which is also killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from ksana.errors import UsageError
from ksana.kv_events.log import EventLog
from ksana.kv_events.mirror import CacheMirror
from ksana.kv_events.transports import nats_publisher
from ksana.kv_events.transports.nats_publisher import LONGEST_SUBJECT_BYTES, NatsPublisher
from ksana.kv_events.wire import END_ID, ID_BYTES, decode_batch, decode_id
from ksana.testing.waiting import wait_until
from ksana.types.config import KVEventsConfig
from ksana.types.kv_events import AllBlocksCleared, BlockStored, EventBatch

SERVER = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")

pytestmark = pytest.mark.skipif(SERVER is None, reason="there is no nats-server")


class Server:
    """A NATS server that can be killed, and started again at the same port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self.options: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SERVER is not None
        command = [SERVER, "-a", "127.0.0.1", "-p", str(self.port), *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def publish(server: Server) -> Iterator[Callable[..., NatsPublisher]]:
    with ExitStack() as stack:

        def start(log: EventLog, **options: Any) -> NatsPublisher:
            config = KVEventsConfig(publisher="nats", **{"endpoint": server.url, "topic": "test.kv", **options})
            publisher = NatsPublisher(config, log)
            stack.callback(publisher.close)
            return publisher

        yield start


def start_log(buffer_steps: int = 10_000) -> EventLog:
    log = EventLog(buffer_steps)
    log.append([AllBlocksCleared()])
    return log


def store(log: EventLog, *hashes: int) -> None:
    for block_hash in hashes:
        log.append([BlockStored((block_hash,), None, (1, 2), 2)])


def decode(data: bytes) -> EventBatch:
    return decode_batch(decode_id(data[:ID_BYTES]), data[ID_BYTES:])


class Consumer:
    """Follows the stream, and asks for what is missing."""

    def __init__(self, client: Client) -> None:
        self.mirror = CacheMirror()
        self._client = client

    async def receive(self, message: nats.aio.msg.Msg) -> None:
        self.mirror.receive(decode(message.data))

    async def ask(self) -> None:
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox)
        await self._client.publish("test.kv.replay", self.mirror.ask(), reply=inbox)
        batches: list[EventBatch] = []
        # Who asks when nobody serves is told so by an empty message.
        while (data := (await subscription.next_msg(timeout=1)).data) and decode_id(data[:ID_BYTES]) != END_ID:
            batches.append(decode(data))
        await subscription.unsubscribe()
        if data:
            self.mirror.answer(batches)

    async def catch_up(self, log: EventLog, *, may_ask: bool = True) -> set[int]:
        while not (self.mirror.is_complete and self.mirror.last_id == log.last_id):
            await asyncio.sleep(0.05)
            if may_ask:
                with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
                    await self.ask()
        return self.mirror.content.block_hashes()


async def _ignore(error: Exception) -> None:
    pass


@asynccontextmanager
async def follow(server: Server) -> AsyncIterator[Consumer]:
    client = Client()
    await client.connect(server.url, error_cb=_ignore, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
    consumer = Consumer(client)
    await client.subscribe("test.kv", cb=consumer.receive)
    try:
        yield consumer
    finally:
        await client.close()


def test_events_arrive(server: Server, publish: Callable[..., NatsPublisher]) -> None:
    async def run() -> None:
        async with follow(server) as consumer:
            assert await consumer.catch_up(log) == set()
            store(log, 1, 2)
            publisher.notify()
            assert await consumer.catch_up(log, may_ask=False) == {1, 2}

    server.start()
    log = start_log()
    publisher = publish(log)
    asyncio.run(run())


def test_who_comes_late_gets_everything(server: Server, publish: Callable[..., NatsPublisher]) -> None:
    async def run() -> None:
        async with follow(server) as consumer:
            assert await consumer.catch_up(log) == set(range(100))

    server.start()
    log = start_log(buffer_steps=5)
    store(log, *range(100))
    publish(log).notify()
    asyncio.run(run())


def test_a_server_that_comes_back(server: Server, publish: Callable[..., NatsPublisher]) -> None:
    """What happened meanwhile is published then; nobody needs to ask for it."""

    async def run() -> None:
        async with follow(server) as consumer:
            store(log, 1)
            publisher.notify()
            await consumer.catch_up(log)
            for block_hash in (2, 3):
                server.kill()
                store(log, block_hash)
                publisher.notify()
                server.start()
                assert await consumer.catch_up(log) == set(range(1, block_hash + 1))

    server.start()
    log = start_log()
    publisher = publish(log)
    asyncio.run(run())


def test_a_server_that_comes_later(
    server: Server, publish: Callable[..., NatsPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with follow(server) as consumer:
            assert await consumer.catch_up(log) == {1, 2}

    log = start_log()
    store(log, 1)
    with caplog.at_level(logging.WARNING):
        publisher = publish(log)
        publisher.notify()
        wait_until(lambda: "cannot be sent" in caplog.text)
        server.start()
        store(log, 2)
        publisher.notify()
        asyncio.run(run())
    assert caplog.text.count("cannot be sent") == 1


def test_a_publisher_without_a_server_stops(publish: Callable[..., NatsPublisher]) -> None:
    publisher = publish(start_log())
    publisher.notify()
    publisher.close()
    publisher.notify()


def test_nonsense_is_not_answered(server: Server, publish: Callable[..., NatsPublisher]) -> None:
    async def run() -> None:
        async with follow(server) as consumer:
            await consumer.catch_up(log)
            for data in (b"", b"dump", b"x" * 1000):
                await consumer._client.publish("test.kv.replay", data)
                with pytest.raises(asyncio.TimeoutError):
                    await consumer._client.request("test.kv.replay", data, timeout=0.1)
            store(log, 1)
            assert await consumer.catch_up(log) == {1}

    server.start()
    log = start_log()
    publish(log)
    asyncio.run(run())


def test_a_server_that_takes_small_messages_only(
    server: Server, publish: Callable[..., NatsPublisher], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A large batch is left out, with one warning; who asks for it gets it in pieces, and what follows is sent."""

    async def run() -> None:
        async with follow(server) as consumer:
            await consumer.catch_up(log)
            for start in (1000, 2000):
                log.append([BlockStored(tuple(range(start, start + 500)), None, (70_000,) * 1000, 2)])
                store(log, start + 500)
                publisher.notify()
                known = await consumer.catch_up(log)
                assert {start, start + 500} <= known
            store(log, 3000)
            publisher.notify()
            assert 3000 in await consumer.catch_up(log, may_ask=False)

    (tmp_path / "nats.conf").write_text("max_payload: 4096")
    server.options = ["-c", str(tmp_path / "nats.conf")]
    server.start()
    log = start_log()
    publisher = publish(log)
    asyncio.run(run())
    assert caplog.text.count("max_payload") == 1
    assert "maximum payload" not in caplog.text


def test_who_listens_may_be_no_nats_server_at_all(
    server: Server, publish: Callable[..., NatsPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again for ever, as one that is not there."""

    async def run() -> None:
        async with follow(server) as consumer:
            assert await consumer.catch_up(log) == {1}

    log = start_log()
    store(log, 1)
    with socket.create_server(("127.0.0.1", server.port)) as listener:
        publish(log)
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"INFO []\r\n")
    wait_until(lambda: "cannot be sent" in caplog.text)
    server.start()
    asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4222", "http://127.0.0.1:4222", "nats://", "nats://a:x"])
def test_what_is_no_address_is_refused(publish: Callable[..., NatsPublisher], endpoint: str) -> None:
    with pytest.raises(UsageError, match="--kv-events-endpoint is no address of a NATS server"):
        publish(start_log(), endpoint=endpoint)


@pytest.mark.parametrize("topic", ["a b", "a..b", "a.*", "a.>", ".a"])
def test_what_is_no_subject_is_refused(publish: Callable[..., NatsPublisher], topic: str) -> None:
    with pytest.raises(UsageError, match="is no NATS subject"):
        publish(start_log(), topic=topic)


def test_the_longest_subject_works(server: Server, publish: Callable[..., NatsPublisher]) -> None:
    """One that the server refuses would end the connection again and again."""
    topic = "é" * (LONGEST_SUBJECT_BYTES // 2)
    with pytest.raises(UsageError, match="1001 bytes is no NATS subject: it may have 1000 at most"):
        publish(start_log(), topic=f"{topic}x")

    async def ask() -> bytes:
        async with follow(server) as consumer:
            inbox = consumer._client.new_inbox()
            subscription = await consumer._client.subscribe(inbox)
            while True:
                await consumer._client.publish(f"{topic}.replay", consumer.mirror.ask(), reply=inbox)
                with contextlib.suppress(asyncio.TimeoutError):
                    if data := (await subscription.next_msg(timeout=1)).data:
                        return data

    server.start()
    log = start_log()
    publish(log, topic=topic)
    assert decode(asyncio.run(ask())).event_id == log.last_id


def test_a_warning_says_that_nobody_answers(
    server: Server,
    publish: Callable[..., NatsPublisher],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error itself has no text."""
    monkeypatch.setattr(nats_publisher, "_CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", server.port)):
        publish(start_log())
        wait_until(lambda: "cannot be sent" in caplog.text)
    assert f"{server.url}: no answer within 0.1 s" in caplog.text


def test_a_password_is_not_logged(publish: Callable[..., NatsPublisher], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="ksana"):
        publish(start_log(), endpoint="nats://me:secret@127.0.0.1:1").notify()
        wait_until(lambda: "cannot be sent" in caplog.text)
    assert "secret" not in caplog.text
