"""What is kept for those who have missed something."""

from __future__ import annotations

import threading

import pytest

from ksana.kv_events.content import CacheContent
from ksana.kv_events.log import MAX_BATCH_BYTES, EncodedBatch, EventLog
from ksana.kv_events.wire import decode_batch, encode_id
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


def block(index: int) -> BlockStored:
    return BlockStored((index,), index - 1 if index else None, (index,), 1)


def filled(num_blocks: int, buffer_steps: int) -> EventLog:
    log = EventLog(buffer_steps, first_id=100)
    log.append([AllBlocksCleared()])
    for index in range(num_blocks):
        log.append([block(index)])
    return log


def ids(batches: list[EncodedBatch]) -> list[int]:
    return [batch.event_id for batch in batches]


def answer(log: EventLog, event_id: int) -> list[EncodedBatch]:
    return list(log.answer(encode_id(event_id)))


def content_of(batches: list[EncodedBatch]) -> set[int]:
    content = CacheContent()
    for batch in batches:
        content.apply(decode_batch(batch.event_id, batch.payload).events)
    return content.block_hashes()


def test_ids_rise_by_one() -> None:
    assert ids(filled(5, 10).after(0)) == [100, 101, 102, 103, 104, 105]


def test_ids_of_a_later_engine_are_higher() -> None:
    """A restart must look like a gap to whoever followed the engine before."""
    first = EventLog(10)
    first.append([AllBlocksCleared()])
    second = EventLog(10)
    assert second.last_id >= first.last_id


def test_only_the_last_batches_are_kept() -> None:
    assert ids(filled(10, 3).after(0)) == [108, 109, 110]


def test_a_publisher_reads_on_where_it_was() -> None:
    log = filled(10, 8)
    assert ids(log.after(105)) == [106, 107, 108, 109, 110]
    assert ids(log.after(105, limit=2)) == [106, 107]
    assert ids(log.after(100, limit=2)) == [103, 104], "those between are gone"
    assert ids(log.after(110)) == []


def test_what_is_kept_is_answered_with_itself() -> None:
    log = filled(10, 5)
    assert ids(answer(log, 108)) == [108, 109, 110]
    assert answer(log, 111) == [], "nothing is missing"


def test_what_is_gone_is_answered_with_a_dump() -> None:
    log = filled(10, 5)
    log.append([BlockRemoved((9,))])
    for asked in (0, 101, 106):
        batches = answer(log, asked)
        assert set(ids(batches)) == {log.last_id}
        assert content_of(batches) == set(range(9))


def test_ids_of_the_future_are_answered_with_a_dump() -> None:
    """Who asks for them has followed another engine."""
    log = filled(2, 5)
    assert content_of(answer(log, 500)) == {0, 1}


def test_a_dump_before_the_first_batch_is_empty() -> None:
    log = EventLog(5, first_id=100)
    [batch] = answer(log, 0)
    assert (batch.event_id, content_of([batch])) == (99, set())


def test_very_large_batches_do_not_fill_the_memory() -> None:
    log = EventLog(1_000_000, first_id=0)
    tokens = tuple(range(2**31, 2**31 + 32_000))
    for index in range(1000):
        log.append([BlockStored((index,), None, tokens, 32_000)])
        log.append([BlockRemoved((index,))])
    assert sum(len(batch.payload) for batch in log.after(-1)) <= 64 * 2**20


def test_what_is_too_large_to_be_sent_is_answered_with_a_dump_in_small_batches() -> None:
    """A NATS server may take less than a batch has."""
    log = filled(0, 1000)
    log.append([BlockStored(tuple(range(2000)), None, tuple(range(2**31, 2**31 + 2000)), 1)])
    assert len(log.after(0)[-1].payload) > 15_000
    log.append([block(5000)])
    assert ids(answer(log, log.last_id)) == [log.last_id], "what is asked for is small"
    batches = list(log.answer(encode_id(log.last_id - 1), max_bytes=10_000))
    assert max(len(batch.payload) for batch in batches) <= 10_000
    assert set(ids(batches)) == {log.last_id}
    assert content_of(batches) == {*range(2000), 5000}


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("forks", [False, True])
def test_a_batch_fits_into_one_message(block_size: int, forks: bool) -> None:
    """Whatever it is made of: long chains, or many blocks with the same parent, each with a salt of its own."""
    log = EventLog(10, first_id=0)
    tokens = tuple(range(2**32 - block_size, 2**32))
    keys = ("\U0001f600" * 256, b"x" * 32) if forks else ()
    parents = [None if forks else index - 1 for index in range(2**63, 2**63 + 20_000)]
    events = [
        BlockStored((index,), parent, tokens, block_size, 7, 4096, extra_keys=keys)
        for index, parent in enumerate(parents, 2**63)
    ]
    log.append(events)
    log.append([BlockRemoved((2**64 - 1,) * 1000)] * 100)
    largest = max(len(batch.payload) for batch in [*log.after(-1), *log.dump()])
    assert largest <= MAX_BATCH_BYTES
    assert largest >= MAX_BATCH_BYTES // 4, "nor are they needlessly small"


def test_an_answer_that_is_read_slowly_keeps_nothing_from_being_forgotten() -> None:
    """Each of many such readers would keep as much as the log does. It ends early, and the next answer is a dump."""
    log = filled(200, 200)
    reader = log.answer(encode_id(110))
    assert next(reader).event_id == 110
    for index in range(200, 1000):
        log.append([block(index)])
    received = [110, *ids(list(reader))]
    assert received == list(range(110, received[-1] + 1))
    assert len(received) < 100
    assert content_of(answer(log, received[-1] + 1)) == set(range(1000))


def test_a_dump_is_of_one_moment() -> None:
    """It is made on the publisher's thread while the engine goes on."""
    log = filled(0, 5)
    stopping = threading.Event()

    def go_on() -> None:
        while not stopping.is_set():
            log.append([block(0)])
            log.append([BlockRemoved((0,))])

    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        for _ in range(200):
            batches = list(log.dump())
            stored = (batches[0].event_id - 100) % 2 == 1
            assert content_of(batches) == ({0} if stored else set())
    finally:
        stopping.set()
        writer.join()
