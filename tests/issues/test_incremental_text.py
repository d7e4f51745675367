"""Public failures of streaming text, each of which once reached users."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ksana.testing.tiny_models import write_tiny_tokenizer
from ksana.text import Detokenizers, FastTokenizer, StopMatcher


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return FastTokenizer(Backend.from_file(str(folder / "tokenizer.json")))


def byte_tokens(tokenizer: FastTokenizer, data: bytes) -> list[int]:
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [table[bytes([byte])] for byte in data]


@pytest.mark.parametrize("size", [1, 2])
def test_no_part_of_a_stop_string_leaks_into_the_stream(size: int) -> None:
    """vllm#3574: text was streamed that later turned out to begin a stop string."""
    text = "ABCDEFGHIJKLMNOP"
    matcher = StopMatcher(("DEFGHIJ",))
    chunks = [matcher.push(text[i : i + size]).text_to_emit for i in range(0, len(text), size)]
    assert "".join(chunks) == "ABC"


def test_stop_strings_do_not_delay_text_that_cannot_belong_to_them() -> None:
    """vllm#13087: with any stop string the first chunks were empty."""
    matcher = StopMatcher(("<|im_end|>", "\n\nUser:"))
    words = ["The", " sky", " is", " blue"]
    assert [matcher.push(word).text_to_emit for word in words] == words


def test_prompt_that_ends_within_a_character_does_not_leak(tokenizer: FastTokenizer) -> None:
    """vllm#48853: the whole prompt came back in the first delta."""
    character = "你".encode()
    prompt = tokenizer.encode("Hello ") + byte_tokens(tokenizer, character[:2])
    completing = Detokenizers(tokenizer).create(prompt)
    assert completing.push(byte_tokens(tokenizer, character[2:])) + completing.push(tokenizer.encode("!")) == "你!"
    breaking = Detokenizers(tokenizer).create(prompt)
    assert breaking.push(tokenizer.encode("abc")) + breaking.finish() == "abc"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_bytes_stream_as_they_decode(tokenizer: FastTokenizer, seed: int, skip_special_tokens: bool) -> None:
    """vllm#17448, vllm#19449: invalid UTF-8 ended the stream with an error, or differed from the whole text."""
    choose = random.Random(seed)
    output = [choose.randrange(tokenizer.vocab_size + 8) for _ in range(300)]
    detokenizer = Detokenizers(tokenizer).create([], skip_special_tokens)
    streamed = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.finish()
    assert streamed == tokenizer.decode(output, skip_special_tokens)
