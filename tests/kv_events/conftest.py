"""Short ways to make caches that are observed, and to send their events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ksana.kv_events.log import EventLog
from ksana.kv_events.recorder import KVEventRecorder
from ksana.kv_events.transports.zmq_mirror import ZmqMirror
from ksana.kv_events.transports.zmq_publisher import ZmqPublisher
from ksana.kv_events.wire import decode_batch
from ksana.testing.paged_memory import make_kv_config
from ksana.types.config import KVEventsConfig
from ksana.types.kv_events import EventBatch
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams


class NoPublisher:
    """For a log that is read directly."""

    def notify(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def make_recorder() -> Callable[..., tuple[KVEventRecorder, Callable[..., list[EventBatch]]]]:
    """``recorder, take = make_recorder(block_size, *windows)``.

    ``take()`` flushes and returns what has been published since, the first of all batches left out.
    """

    def make(
        block_size: int, *windows: int | None, from_start: bool = False
    ) -> tuple[KVEventRecorder, Callable[..., list[EventBatch]]]:
        log = EventLog(1000, first_id=1)
        recorder = KVEventRecorder(make_kv_config(10, block_size, windows or (None,)), log, NoPublisher())
        taken = 0 if from_start else log.last_id

        def take(*, flush: bool = True) -> list[EventBatch]:
            nonlocal taken
            if flush:
                recorder.flush()
            batches = [decode_batch(batch.event_id, batch.payload) for batch in log.after(taken)]
            taken = log.last_id
            return batches

        return recorder, take

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request whose blocks of 4 tokens have hashes that show their place."""

    def make(num_blocks: int, name: str = "a", **options: Any) -> Request:
        request = Request(name, list(range(4 * num_blocks)), SamplingParams(), max_total_tokens=100_000, **options)
        request.block_hashes = [f"{name}{index:031}".encode() for index in range(num_blocks)]
        return request

    return make


@pytest.fixture
def publish() -> Iterator[Callable[..., ZmqPublisher]]:
    """Start a publisher on free ports, or others; it ends with the test at the latest."""
    with ExitStack() as stack:

        def start(log: EventLog, **options: Any) -> ZmqPublisher:
            config = KVEventsConfig(publisher="zmq", **{"endpoint": "tcp://127.0.0.1:*", **options})
            publisher = ZmqPublisher(config, log)
            stack.callback(publisher.close)
            return publisher

        yield start


@pytest.fixture
def follow() -> Iterator[Callable[..., ZmqMirror]]:
    """A mirror of what a publisher publishes."""
    with ExitStack() as stack:

        def connect(publisher: ZmqPublisher, **options: Any) -> ZmqMirror:
            options = {"quiet_s": 0.1, "answer_timeout_s": 0.5, **options}
            return stack.enter_context(ZmqMirror(publisher.endpoint, publisher.replay_endpoint, **options))

        yield connect
