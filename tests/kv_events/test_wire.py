"""Batches as bytes."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.kv_events.wire import decode_batch, decode_id, encode_batch, encode_id
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

HASHES = st.integers(0, 2**64 - 1)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    size = draw(st.integers(1, 4))
    hashes = draw(st.lists(HASHES, min_size=1, max_size=4))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    return BlockStored(
        tuple(hashes),
        draw(st.none() | HASHES),
        tuple(tokens),
        size,
        draw(st.integers(0, 5)),
        draw(st.none() | st.integers(1, 10_000)),
        draw(st.none() | st.text(max_size=5)),
        tuple(draw(st.lists(st.text(max_size=5) | st.binary(max_size=5), max_size=2))),
    )


EVENTS = (
    stored()
    | st.builds(BlockRemoved, st.lists(HASHES, min_size=1, max_size=4).map(tuple), st.integers(0, 5))
    | st.just(AllBlocksCleared())
)


@given(st.integers(0, 2**64 - 2), st.floats(0, 1e10), st.lists(EVENTS, max_size=4))
def test_what_is_written_is_read(event_id: int, ts: float, events: list) -> None:
    batch = EventBatch(event_id, ts, tuple(events))
    assert decode_batch(decode_id(encode_id(event_id)), encode_batch(batch)) == batch


def test_any_salt_can_be_written() -> None:
    """What is written in the middle of an engine's step must not raise."""
    batch = EventBatch(1, 0.0, (BlockStored((1,), None, (1,), 1, extra_keys=("\ud800",)),))
    assert decode_batch(1, encode_batch(batch)) == batch


def test_the_form_is_that_of_vllm() -> None:
    """Position by position, as subscribers in other languages read it."""
    batch = EventBatch(
        7,
        1.5,
        (
            BlockStored((1, 2), 2**64 - 1, (5, 6, 7, 8), 2, 1, 64, "adapter", ("salt", b"\0")),
            BlockRemoved((3,), 1),
            AllBlocksCleared(),
        ),
    )
    keys = [["salt", b"\0"], None]
    assert msgpack.unpackb(encode_batch(batch)) == [
        1.5,
        [
            ["BlockStored", [1, 2], 2**64 - 1, [5, 6, 7, 8], 2, None, None, "adapter", keys, 1, "sliding_window", 64],
            ["BlockRemoved", [3], None, 1],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_shorter_and_longer_events_are_read() -> None:
    """Those of other engines, and of versions to come."""
    payload = msgpack.packb(
        [1.0, [["BlockStored", [1], None, [5], 1, None], ["BlockRemoved", [1], None, 2, "new"]], 0, "new"]
    )
    assert decode_batch(0, payload).events == (BlockStored((1,), None, (5,), 1), BlockRemoved((1,), 2))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(1),
        msgpack.packb([1.0]),
        msgpack.packb([1.0, 2, 0]),
        msgpack.packb([1.0, [["BlockMoved", [1]]], 0]),
        msgpack.packb([1.0, [["BlockStored", [1]]], 0]),
        msgpack.packb([1.0, [["BlockStored", [1, 2], None, [5], 1, None]], 0]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}], 0]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch"):
        decode_batch(0, payload)


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789"])
def test_what_is_no_id_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="8 bytes"):
        decode_id(data)
