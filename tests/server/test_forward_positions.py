"""Slices select what Python's own slices select, or are refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import RequestError
from ksana.server.forward_positions import positions_of_slices, positions_of_tokens
from ksana.server.tensors import encode_tensor

NUM_TOKENS = st.integers(1, 40)


@given(st.data(), NUM_TOKENS)
def test_any_set_of_positions_can_be_written_as_slices(data: st.DataObject, num_tokens: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, num_tokens - 1), max_size=8)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    negative = data.draw(st.lists(st.booleans(), min_size=2 * len(pairs), max_size=2 * len(pairs)))
    ends = [end for pair in pairs for end in pair]
    written = [end - num_tokens if back else end for end, back in zip(ends, negative, strict=True)]
    found = positions_of_slices(list(zip(written[::2], written[1::2], strict=True)), num_tokens, "slice_pos")
    assert found == [position for first, last in pairs for position in range(num_tokens)[first : last + 1]]


@given(st.lists(st.tuples(st.integers(-60, 60), st.integers(-60, 60)), max_size=5), NUM_TOKENS)
def test_whatever_is_accepted_lies_in_the_prompt_and_ascends(slices: list[tuple[int, int]], num_tokens: int) -> None:
    try:
        found = positions_of_slices(slices, num_tokens, "slice_pos")
    except RequestError:
        return
    assert found == sorted(set(found))
    assert all(0 <= position < num_tokens for position in found)
    assert len(found) >= len(slices)


@given(st.sets(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_tokens_are_found_at_all_their_positions(wanted: set[int], tokens: list[int]) -> None:
    found = positions_of_tokens(wanted, tokens)
    assert [tokens[position] for position in found] == [token for token in tokens if token in wanted]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bfloat16_is_rounded_as_torch_does(numbers: list[float]) -> None:
    array = np.array([numbers], dtype=np.float32)
    found = encode_tensor(array, "bfloat16")
    expected = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy().tobytes()
    assert (base64.b64decode(found["data"]), found["shape"]) == (expected, [1, len(numbers)])


def test_an_unsorted_slice_is_named() -> None:
    with pytest.raises(RequestError, match="overlaps") as caught:
        positions_of_slices([(4, 5), (0, 1)], 9, "here")
    assert caught.value.param == "here[1]"
