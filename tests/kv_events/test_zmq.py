"""Publisher and mirror over real ZeroMQ sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import zmq

from ksana.kv_events.log import EventLog
from ksana.kv_events.transports.zmq_mirror import ZmqMirror
from ksana.kv_events.transports.zmq_publisher import ZmqPublisher
from ksana.kv_events.wire import END_ID, decode_id, encode_id
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

Publish = Callable[..., ZmqPublisher]
Follow = Callable[..., ZmqMirror]


def start_log(buffer_steps: int = 10_000) -> EventLog:
    log = EventLog(buffer_steps)
    log.append([AllBlocksCleared()])
    return log


def store(log: EventLog, *hashes: int, tokens: tuple[int, ...] = (1, 2)) -> None:
    for block_hash in hashes:
        log.append([BlockStored((block_hash,), None, tokens, len(tokens))])


def catch_up(mirror: ZmqMirror, log: EventLog) -> set[int]:
    """Poll until the mirror knows the last batch; returns the blocks that it holds then."""
    while not (mirror.mirror.is_complete and mirror.mirror.last_id == log.last_id):
        mirror.poll(0.05)
    return mirror.mirror.content.block_hashes()


def test_events_arrive(publish: Publish, follow: Follow) -> None:
    log = start_log()
    publisher = publish(log)
    mirror = follow(publisher)
    assert catch_up(mirror, log) == set()
    store(log, 1, 2, 3)
    log.append([BlockRemoved((2,))])
    publisher.notify()
    assert catch_up(mirror, log) == {1, 3}


def test_who_comes_late_gets_everything(publish: Publish, follow: Follow) -> None:
    log = start_log(buffer_steps=5)
    publisher = publish(log)
    store(log, *range(100))
    publisher.notify()
    assert catch_up(follow(publisher), log) == set(range(100))


def test_a_lost_last_batch_is_noticed(publish: Publish, follow: Follow) -> None:
    """No batch comes after it that would show the gap."""
    log = start_log()
    mirror = follow(publish(log))
    catch_up(mirror, log)
    store(log, 1)  # and nobody tells the publisher
    assert catch_up(mirror, log) == {1}


def test_messages_have_the_frames_of_vllm(publish: Publish) -> None:
    """Stream: topic, id, payload. Answer: the same behind an empty frame, up to the id of the end."""
    log = start_log()
    publisher = publish(log, topic="kv@here")
    with zmq.Context() as context, context.socket(zmq.SUB) as stream, context.socket(zmq.DEALER) as requests:
        stream.subscribe("kv@")
        stream.connect(publisher.endpoint)
        requests.connect(publisher.replay_endpoint)
        while not stream.poll(20):
            store(log, 1)
            publisher.notify()
        topic, event_id, payload = stream.recv_multipart()
        [batch] = log.after(decode_id(event_id) - 1, limit=1)
        assert (topic, payload) == (b"kv@here", batch.payload)
        requests.send_multipart((b"", event_id))
        answer = [requests.recv_multipart()]
        while answer[-1][-1]:
            answer.append(requests.recv_multipart())
        assert answer[0] == [b"", b"kv@here", event_id, payload]
        assert answer[-1] == [b"", b"kv@here", encode_id(END_ID), b""]


def test_a_topic_that_nobody_subscribed_to_is_not_sent(publish: Publish, follow: Follow) -> None:
    log = start_log()
    publisher = publish(log, topic="one")
    one, two = follow(publisher, topic="one"), follow(publisher, topic="two")
    received = []
    while len(received) < 10:
        store(log, 1)
        publisher.notify()
        received += one.poll(0.05)
        assert two.poll(0.01) == []


def test_a_slow_consumer_is_not_waited_for(publish: Publish, follow: Follow) -> None:
    """It loses batches, sees that, and gets what it needs; the others lose nothing, and the publisher goes on."""
    log = start_log()
    publisher = publish(log, hwm=2)
    slow, fast = follow(publisher, quiet_s=60.0), follow(publisher)
    catch_up(slow, log)
    tokens = tuple(range(8000, 12_000))  # much for the buffers of the connection
    for index in range(3000):
        store(log, index, tokens=tokens)
        publisher.notify()
    assert catch_up(fast, log) == set(range(3000))
    ids = [batch.event_id for batch in iter(lambda: (slow.poll(0.0) or [None])[0], None)]
    assert len(ids) < 3000
    store(log, 9999)
    publisher.notify()
    assert catch_up(slow, log) == {*range(3000), 9999}


def test_an_answer_waits_for_who_reads_slowly(publish: Publish) -> None:
    """More than fits into the buffers of a connection must neither be lost nor hold up the stream."""
    log = start_log()
    publisher = publish(log)
    store(log, *range(4000), tokens=tuple(range(70_000, 72_000)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as requests, context.socket(zmq.SUB) as stream:
        requests.setsockopt(zmq.RCVHWM, 1)
        requests.connect(publisher.replay_endpoint)
        requests.send_multipart((b"", encode_id(log.last_id - 3999)))
        stream.subscribe("")
        stream.connect(publisher.endpoint)
        while not stream.poll(20):
            store(log, 1)
            publisher.notify()
        ids = []
        while (message := requests.recv_multipart())[-1]:
            ids.append(decode_id(message[2]))
        assert ids[:4000] == list(range(ids[0], ids[0] + 4000))


@pytest.mark.parametrize(
    "frames", [[b""], [b"dump"], [b"", b""], [b"", b"1234567"], [b"", b"x" * 500], [b"", b"12345678", b"12345678"]]
)
def test_nonsense_is_not_answered(publish: Publish, follow: Follow, frames: list[bytes]) -> None:
    log = start_log()
    publisher = publish(log)
    with zmq.Context() as context, context.socket(zmq.DEALER) as requests:
        requests.connect(publisher.replay_endpoint)
        requests.send_multipart(frames)
        store(log, 1)
        assert catch_up(follow(publisher), log) == {1}
        assert not requests.poll(50)


def test_a_client_that_leaves_amid_its_answer_is_forgotten(publish: Publish, follow: Follow) -> None:
    log = start_log()
    publisher = publish(log)
    store(log, *range(5000), tokens=tuple(range(70_000, 72_000)))
    for _ in range(100):
        with zmq.Context() as context, context.socket(zmq.DEALER) as requests:
            requests.setsockopt(zmq.RCVHWM, 1)
            requests.connect(publisher.replay_endpoint)
            requests.send_multipart((b"", encode_id(0)))
            requests.recv_multipart()
            requests.close(linger=0)
    assert catch_up(follow(publisher), log) == set(range(5000))


def test_a_restarted_engine_replaces_what_was(publish: Publish, follow: Follow) -> None:
    log = start_log()
    publisher = publish(log)
    endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    mirror = follow(publisher)
    store(log, 1, 2)
    publisher.notify()
    catch_up(mirror, log)
    publisher.close()

    log = start_log()
    store(log, 3)
    publisher = publish(log, **endpoints)
    assert catch_up(mirror, log) == {3}
    store(log, 4)
    publisher.notify()
    assert catch_up(mirror, log) == {3, 4}


def test_a_mirror_may_come_before_the_engine(publish: Publish, follow: Follow) -> None:
    publisher = publish(start_log())
    endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    publisher.close()
    mirror = follow(publisher)
    assert mirror.poll(0.2) == []
    log = start_log()
    store(log, 1)
    publish(log, **endpoints)
    assert catch_up(mirror, log) == {1}


def test_what_is_new_is_sent_before_the_end(publish: Publish, follow: Follow) -> None:
    log = start_log()
    publisher = publish(log)
    mirror = follow(publisher, quiet_s=60.0)
    catch_up(mirror, log)
    store(log, *range(100))
    publisher.close()
    assert catch_up(mirror, log) == set(range(100))


def test_telling_a_stopped_publisher_is_harmless(publish: Publish) -> None:
    publisher = publish(start_log())
    publisher.close()
    publisher.notify()
    publisher.close()


def test_the_engine_never_waits(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the publisher's thread hangs."""
    hanging = threading.Event()
    monkeypatch.setattr(ZmqPublisher, "_publish", lambda self: hanging.wait() and False)
    log = start_log(buffer_steps=10)
    publisher = publish(log)
    for index in range(100_000):
        publisher.notify()
        if index % 100 == 0:
            store(log, index)
    hanging.set()


def test_socket_files(publish: Publish, follow: Follow, tmp_path) -> None:
    log = start_log()
    publisher = publish(log, endpoint=f"ipc://{tmp_path}/events")
    assert publisher.replay_endpoint == f"ipc://{tmp_path}/events.replay"
    store(log, 1)
    assert catch_up(follow(publisher), log) == {1}


def test_the_thread_survives_an_error(publish: Publish, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    log = start_log()
    real, failures = log.after, iter([True, True])

    def fail_twice(*arguments):
        if next(failures, False):
            raise OSError("planted")
        return real(*arguments)

    monkeypatch.setattr(log, "after", fail_twice)
    publisher = publish(log)
    store(log, 1)
    publisher.notify()
    assert catch_up(follow(publisher), log) == {1}
