"""What the cache's changes look like as events."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ksana.kv_events.block_hash import external_hash
from ksana.kv_events.content import MAX_EVENT_SIZE
from ksana.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from ksana.types.request import InputEmbedding, Request

MakeRequest = Callable[..., Request]


def ids(request: Request) -> tuple[int, ...]:
    return tuple(map(external_hash, request.block_hashes))


def test_hashes_are_the_last_64_bits_of_those_of_the_cache() -> None:
    assert external_hash(bytes(range(32))) == 0x18191A1B1C1D1E1F


def test_an_engine_begins_with_an_empty_cache(make_recorder) -> None:
    """A consumer may remember the blocks of an engine that was here before."""
    _, take = make_recorder(4, from_start=True)
    assert [batch.events for batch in take(flush=False)] == [(AllBlocksCleared(),)]


def test_steps_without_changes_publish_nothing(make_recorder) -> None:
    _, take = make_recorder(4)
    assert take() == []
    assert take() == []


def test_neighbouring_blocks_become_one_event(make_recorder, make_request: MakeRequest) -> None:
    recorder, take = make_recorder(4)
    request = make_request(4)
    for index in (1, 2):
        recorder.blocks_stored(request, 0, index, request.block_hashes[index : index + 1])
    recorder.block_removed(0, b"x" * 32)
    recorder.block_removed(0, b"y" * 32)
    [batch] = take()
    hashes = ids(request)
    assert batch.events == (
        BlockStored(hashes[1:3], hashes[0], tuple(range(4, 12)), 4),
        BlockRemoved((external_hash(b"x" * 32), external_hash(b"y" * 32))),
    )


def test_chains_of_different_requests_are_not_joined(make_recorder, make_request: MakeRequest) -> None:
    recorder, take = make_recorder(4)
    first, second = make_request(2, "a"), make_request(2, "b")
    recorder.blocks_stored(first, 0, 0, first.block_hashes)
    recorder.blocks_stored(second, 0, 0, second.block_hashes)
    [batch] = take()
    assert [event.parent_block_hash for event in batch.events] == [None, None]


def test_what_happens_to_a_block_keeps_its_order(make_recorder, make_request: MakeRequest) -> None:
    """Stored, evicted and stored again within a step: whoever follows must end with the block."""
    recorder, take = make_recorder(4)
    request = make_request(1)
    recorder.blocks_stored(request, 0, 0, request.block_hashes)
    recorder.block_removed(0, request.block_hashes[0])
    recorder.blocks_stored(request, 0, 0, request.block_hashes)
    [batch] = take()
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, BlockStored]


def test_groups_that_take_turns_do_not_break_each_others_events(make_recorder, make_request: MakeRequest) -> None:
    recorder, take = make_recorder(4, None, 8)
    request = make_request(3)
    for index in range(3):
        for group_id in (0, 1):
            recorder.blocks_stored(request, group_id, index, request.block_hashes[index : index + 1])
    [batch] = take()
    assert [(event.group_id, event.sliding_window, len(event.block_hashes)) for event in batch.events] == [
        (0, None, 3),
        (1, 8, 3),
    ]


def test_a_reset_cache_is_published_at_once(make_recorder, make_request: MakeRequest) -> None:
    """It may happen between steps, and then the next one may never come."""
    recorder, take = make_recorder(4)
    request = make_request(1)
    recorder.blocks_stored(request, 0, 0, request.block_hashes)
    recorder.all_blocks_cleared()
    [batch] = take(flush=False)
    assert batch.events == (AllBlocksCleared(),)


def test_a_long_prompt_becomes_several_events_in_a_chain(make_recorder, make_request: MakeRequest) -> None:
    recorder, take = make_recorder(4)
    request = make_request(5 * MAX_EVENT_SIZE // 4)
    recorder.blocks_stored(request, 0, 0, request.block_hashes)
    batches = take()
    events = [event for batch in batches for event in batch.events]
    assert len(batches) > 1, "a batch must fit into one message"
    assert [len(event.token_ids) for event in events] == [MAX_EVENT_SIZE] * 5
    assert [event.parent_block_hash for event in events[1:]] == [event.block_hashes[-1] for event in events[:-1]]
    assert [token for event in events for token in event.token_ids] == request.all_token_ids


@pytest.mark.parametrize(
    ("options", "extra_keys"),
    [
        ({"cache_salt": "mine"}, ("mine",)),
        ({"embeddings": (InputEmbedding(0, np.zeros((1, 2))),)}, (b"a" + b"0" * 31,)),
    ],
)
def test_equal_tokens_of_other_content_can_be_told_apart(
    make_recorder, make_request: MakeRequest, options, extra_keys
) -> None:
    recorder, take = make_recorder(4)
    request = make_request(2, **options)
    recorder.blocks_stored(request, 0, 0, request.block_hashes[:1])
    recorder.flush()
    recorder.blocks_stored(request, 0, 1, request.block_hashes[1:])
    first, second = take()
    assert [first.events[0].extra_keys, second.events[0].extra_keys] == [extra_keys, ()]


def test_a_long_salt_is_told_by_its_digest(make_recorder, make_request: MakeRequest) -> None:
    """A client chooses it, and a batch must fit into one message."""
    recorder, take = make_recorder(4)
    salts = ["s" * 256, "s" * 257, "\ud800" * 1_000_000]
    for number, salt in enumerate(salts):
        request = make_request(1, str(number), cache_salt=salt)
        recorder.blocks_stored(request, 0, 0, request.block_hashes)
    [batch] = take()
    first, *others = [event.extra_keys[0] for event in batch.events]
    assert first == salts[0]
    assert [len(key) for key in others] == [len("sha256:") + 64] * 2
    assert len(set(others)) == 2
