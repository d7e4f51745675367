"""Small tokenizers of the two byte-exact kinds, and one that is neither."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ksana.text import FastTokenizer

CORPUS = ["the cat sat on the mat and the dog sat on the log", "été 你好 世界 🙂 naïve", "one two three 1 2 3"]
SPECIAL_TOKENS = ["<|end|>", "<|start|>"]


@pytest.fixture(scope="session")
def byte_level() -> FastTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # An added token spelled with characters of the byte alphabet, and one with a character outside it.
    backend.add_tokens([AddedToken("é", normalized=False), AddedToken("two words", normalized=False)])
    return FastTokenizer(backend, "<|start|>", "<|end|>")


@pytest.fixture(scope="session")
def byte_fallback() -> FastTokenizer:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁▁", "▁the", "▁cat", "the", "cat", "h", "e", "é", "▁é", "t", "th"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁", "é")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return FastTokenizer(backend, "<s>", "</s>")


@pytest.fixture(scope="session")
def metaspace() -> FastTokenizer:
    """The decoder drops the space of the first token only, so no token has bytes of its own."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁cat", -1.5), ("s", -2.0), ("▁", -3.0)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    return FastTokenizer(backend)
