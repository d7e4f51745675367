from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from ksana.errors import ModelLoadError
from ksana.models.gguf_tokenizer import create_gguf_chat_template, create_gguf_tokenizer
from ksana.models.locate import resolve_model
from ksana.testing.tiny_models import write_tiny_tokenizer
from ksana.text import FastTokenizer
from ksana.text import Tokenizer as TokenizerProtocol

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CHAT = [{"role": "user", "content": "What is 12 + 345?"}]
TEXTS = [
    "Hello, world!",
    "  two  spaces and\ttabs\n\nand lines ",
    "don't we'll I'M",
    "naïve café 你好 🙂 עברית",
    "def f(x):\n    return x ** 2",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def demo() -> FastTokenizer:
    return create_gguf_tokenizer(resolve_model("demo"))


@pytest.fixture(scope="module")
def demo_reference() -> Any:
    path = resolve_model("demo")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_demo_equals_transformers_on_text_without_digits(demo: FastTokenizer, demo_reference: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == demo_reference.encode(text, add_special_tokens=False)
    assert demo.decode(ids, skip_special_tokens=False) == text


def test_demo_reads_digits_one_by_one(demo: FastTokenizer) -> None:
    # The model was trained so; the conversion in transformers does not know it.
    pieces = [demo.decode([i]) for i in demo.encode("in 2024, x10")]
    assert pieces == ["in", " ", "2", "0", "2", "4", ",", " x", "1", "0"]


def test_demo_special_tokens(demo: FastTokenizer) -> None:
    assert isinstance(demo, TokenizerProtocol)
    assert (demo.bos_token, demo.bos_token_id) == ("<|im_start|>", 1)
    assert (demo.eos_token, demo.eos_token_id) == ("<|im_end|>", 2)
    assert demo.encode("<|im_end|>") == [2]
    assert 2 in demo.special_token_ids
    assert demo.decode([1, 19556, 2]) == "Hello"


def test_demo_chat_template_equals_transformers(demo_reference: Any) -> None:
    template = create_gguf_chat_template(resolve_model("demo"))
    assert template is not None
    assert template.render(CHAT) == demo_reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)


def write(path: Path, model: str, tokens: list[str], types: list[int], **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(folder: Path, **values: Any) -> tuple[Path, Tokenizer]:
    """A GGUF file of the tiny tokenizer, and that tokenizer."""
    write_tiny_tokenizer(folder)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    values |= {"merges": merges, "bos_token_id": 0, "eos_token_id": 2}
    return write(folder / "m.gguf", "gpt2", tokens, types, **values), original


WORDS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
@given(text=st.text("the quick2024 \n'sSé.", max_size=40))
@settings(deadline=None, max_examples=50)
def test_byte_level_kinds_equal_the_original(tmp_path_factory: pytest.TempPathFactory, pre: str, text: str) -> None:
    ours, original = _byte_level_pair(tmp_path_factory, pre)
    assert ours.encode(text, add_special_tokens=False) == original.encode(text).ids


_PAIRS: dict[str, tuple[FastTokenizer, Tokenizer]] = {}


def _byte_level_pair(tmp_path_factory: pytest.TempPathFactory, pre: str) -> tuple[FastTokenizer, Tokenizer]:
    if pre not in _PAIRS:
        path, original = write_byte_level(tmp_path_factory.mktemp("gguf"), pre=pre)
        if pre in WORDS:
            splitter = pre_tokenizers.Split(Regex(WORDS[pre]), "isolated")
            original.pre_tokenizer = pre_tokenizers.Sequence(
                [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        _PAIRS[pre] = create_gguf_tokenizer(path), original
    return _PAIRS[pre]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({"pre": "gpt-2"}, ([], [])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, ([0], [2])),
    ],
)
def test_begin_and_end_tokens(tmp_path: Path, values: dict[str, Any], ends: tuple[list[int], list[int]]) -> None:
    tokenizer = create_gguf_tokenizer(write_byte_level(tmp_path, **values)[0])
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == ends[0] + plain + ends[1]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("gpt2", {"pre": "tekken", "merges": ["a b"]}, "pre-tokenizer 'tekken' is not supported; supported: smollm"),
        ("gpt2", {"pre": "gpt-2"}, "merges is missing"),
        ("t5", {}, "tokenizer model 't5' is not supported"),
        ("llama", {}, "scores is missing"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a b"], "bos_token_id": 99}, "bos_token_id is 99, of 3 tokens"),
    ],
)
def test_what_cannot_be_built_is_named(tmp_path: Path, model: str, values: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", model, ["a", "b", "ab"], [NORMAL] * 3, **values)
    with pytest.raises(ModelLoadError, match=message):
        create_gguf_tokenizer(path)


def test_no_chat_template(tmp_path: Path) -> None:
    assert create_gguf_chat_template(write_byte_level(tmp_path, pre="gpt-2")[0]) is None


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[FastTokenizer, Any]:
    """A trained SentencePiece BPE with byte pieces, and the tokenizer made of its GGUF form."""
    corpus = ["the cat sat on the mat", "the dog sat on the log", "été naïve 2024", "a man and a plan and a canal"] * 20
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=trained,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    pieces = range(original.vocab_size())
    kind = {0: UNKNOWN, 1: CONTROL, 2: CONTROL}
    path = write(
        tmp_path_factory.mktemp("spm") / "m.gguf",
        "llama",
        [original.id_to_piece(i) for i in pieces],
        [kind.get(i, BYTE if original.is_byte(i) else NORMAL) for i in pieces],
        scores=[original.get_score(i) for i in pieces],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    return create_gguf_tokenizer(path), original


@given(text=st.text("the cat sandlogmé你\n29", max_size=40))
@settings(deadline=None)
def test_byte_fallback_equals_sentencepiece(sentencepiece_pair: tuple[FastTokenizer, Any], text: str) -> None:
    ours, original = sentencepiece_pair
    ids = ours.encode(text)
    assert ids == [1, *original.encode(text)]
    assert ours.decode(ids) == original.decode(ids[1:]) == text
