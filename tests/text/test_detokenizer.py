from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.text import Detokenizers, FastTokenizer

ids = st.lists(st.integers(0, 400), max_size=40)
BYTE_OF_NOTHING = "\ufffd"


def stream(tokenizer: FastTokenizer, prompt: list[int], output: list[int], skip: bool, step: int = 1) -> list[str]:
    detokenizer = Detokenizers(tokenizer).create(prompt, skip)
    deltas = [detokenizer.push(output[i : i + step]) for i in range(0, len(output), step)]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("fixture", ["byte_level", "byte_fallback"])
@given(prompt=ids, output=ids, skip=st.booleans(), step=st.integers(1, 5))
@settings(deadline=None)
def test_stream_is_what_the_whole_text_adds_to_the_prompt(
    fixture: str, request: pytest.FixtureRequest, prompt: list[int], output: list[int], skip: bool, step: int
) -> None:
    tokenizer = request.getfixturevalue(fixture)
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    text = "".join(stream(tokenizer, prompt, output, skip, step))
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:
        # The prompt ends within a character, which the output completes.
        assert before.endswith(BYTE_OF_NOTHING)
        assert text == whole[len(before) - 1 :]


@given(output=ids, skip=st.booleans())
@settings(deadline=None)
def test_no_more_than_an_unfinished_character_is_held_back(
    byte_level: FastTokenizer, output: list[int], skip: bool
) -> None:
    detokenizer = Detokenizers(byte_level).create([], skip)
    sent = ""
    for count, token_id in enumerate(output, start=1):
        sent += detokenizer.push([token_id])
        whole = byte_level.decode(output[:count], skip)
        assert whole.startswith(sent)
        assert whole[len(sent) :] in ("", BYTE_OF_NOTHING)


def test_leading_space_is_kept_behind_a_prompt_and_dropped_at_the_start(byte_fallback: FastTokenizer) -> None:
    space_the = byte_fallback._backend.token_to_id("▁the")
    space_cat = byte_fallback._backend.token_to_id("▁cat")
    bos = byte_fallback.bos_token_id
    assert bos is not None
    assert stream(byte_fallback, [bos, space_the], [space_cat], True) == [" cat", ""]
    assert stream(byte_fallback, [bos], [space_the, space_cat], True) == ["the", " cat", ""]
    assert stream(byte_fallback, [bos], [space_the], False) == [" the", ""]


@pytest.mark.parametrize(("skip", "expected"), [(True, "the cat"), (False, "the<|end|> cat")])
def test_special_tokens_follow_the_flag(byte_level: FastTokenizer, skip: bool, expected: str) -> None:
    output = byte_level.encode("the<|end|> cat")
    assert "".join(stream(byte_level, [], output, skip)) == expected


def test_pushes_of_several_tokens_equal_single_ones(byte_level: FastTokenizer) -> None:
    output = byte_level.encode("你好 the cat 🙂")
    assert "".join(stream(byte_level, [], output, True, step=4)) == "你好 the cat 🙂"


def test_unknown_decoder_streams_through_a_window(metaspace: FastTokenizer) -> None:
    assert not metaspace.is_byte_exact
    prompt, output = metaspace.encode("the cat"), metaspace.encode("the cats the cats")
    assert "".join(stream(metaspace, prompt, output * 30, True)) == " the cats the cats" * 30


def test_window_stays_short_whatever_is_skipped(metaspace: FastTokenizer) -> None:
    unknown = 0
    detokenizer = Detokenizers(metaspace).create(metaspace.encode("the"), skip_special_tokens=True)
    assert detokenizer.push([unknown] * 1000) == ""
    assert len(detokenizer._window) < 40  # type: ignore[attr-defined]
    assert detokenizer.push(metaspace.encode("cat")) == " cat"
