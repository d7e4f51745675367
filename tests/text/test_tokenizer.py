from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from ksana.errors import RequestError
from ksana.text import FastTokenizer, Tokenizer

ids = st.lists(st.integers(0, 400), max_size=40)


def test_text_floor_loads_no_heavy_library() -> None:
    code = "import sys, ksana.text; print({'torch', 'transformers', 'aiohttp', 'tokenizers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_fast_tokenizer_is_a_tokenizer(byte_level: FastTokenizer) -> None:
    assert isinstance(byte_level, Tokenizer)


@given(ids=ids, skip=st.booleans())
@settings(deadline=None)
def test_byte_level_decode_equals_the_library(byte_level: FastTokenizer, ids: list[int], skip: bool) -> None:
    known = [i for i in ids if i < byte_level.vocab_size]
    assert byte_level.decode(ids, skip) == byte_level._backend.decode(known, skip_special_tokens=skip)


@given(text=st.text(max_size=60), skip=st.booleans())
@settings(deadline=None)
def test_byte_fallback_decode_equals_the_library_on_valid_text(
    byte_fallback: FastTokenizer, text: str, skip: bool
) -> None:
    ids = byte_fallback.encode(text)
    assert byte_fallback.decode(ids, skip) == byte_fallback._backend.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_keeps_valid_characters_beside_a_broken_one(byte_fallback: FastTokenizer) -> None:
    # The library turns the whole run of byte tokens into replacement characters, also those already streamed.
    broken = [3 + byte for byte in "你".encode() + b"\xff"]
    assert byte_fallback.decode(broken) == "你\ufffd"


@given(text=st.text(max_size=200).filter(lambda text: "é" not in text))
@settings(deadline=None)
def test_byte_level_round_trip(byte_level: FastTokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


def test_special_tokens_follow_the_flag(byte_level: FastTokenizer) -> None:
    ids = byte_level.encode("<|start|>the cat<|end|>")
    assert ids[0] == byte_level.bos_token_id
    assert ids[-1] == byte_level.eos_token_id
    assert byte_level.decode(ids) == "the cat"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|start|>the cat<|end|>"


@pytest.mark.parametrize("fixture", ["byte_level", "byte_fallback", "metaspace"])
def test_ids_out_of_range_add_nothing(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(fixture)
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 2**40]) == tokenizer.decode(ids)
    assert not tokenizer.token_bytes(-1)
    assert not tokenizer.token_bytes(tokenizer.vocab_size)


def test_lone_surrogate_is_the_clients_fault(byte_level: FastTokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800\) at character 2"):
        byte_level.encode("ab\ud800")


@pytest.mark.parametrize("text", ["", "\0", "a\0b", "\ufffd\ufffe", "x" * 1_000_000, "the " * 250_000, "\n" * 100_000])
def test_unusual_texts_survive(byte_level: FastTokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert FastTokenizer(backend).encode("a a a a") == [0, 0, 0, 0]


def test_other_threads_run_while_a_long_text_is_encoded(byte_level: FastTokenizer) -> None:
    """The library's plain encode keeps the interpreter lock: event loops stood still for seconds."""
    started, turns = threading.Event(), 0

    def encode() -> None:
        started.set()
        byte_level.encode("in the beginning " * 100_000)

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns >= 10
