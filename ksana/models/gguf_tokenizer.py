"""The tokenizer and chat template inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.models.weights.gguf_file import GGUFFile
from ksana.text.chat_template import ChatTemplate
from ksana.text.tokenizer import FastTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE_PIECE = "\u2581"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UNNAMED_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
"""What llama.cpp does for files that name no pre-tokenizer."""


def create_gguf_tokenizer(path: Path) -> FastTokenizer:
    """Build the tokenizer that the file describes.

    Raises:
        ModelLoadError: it has none, or one that cannot be built exactly.
    """
    file = GGUFFile.open(path)
    kind = file.get("tokenizer.ggml.model", str)
    build = _BUILDERS.get(kind or "")
    if build is None:
        raise ModelLoadError(
            f"{path}: tokenizer model {kind!r} is not supported; supported: {', '.join(_BUILDERS)}. "
            "A folder with tokenizer.json can be given instead with --tokenizer"
        )
    tokens = _string_list(file, "tokenizer.ggml.tokens")
    backend = build(file, tokens)
    _add_special_tokens(file, backend, tokens)
    return FastTokenizer(backend, _token(file, tokens, "bos"), _token(file, tokens, "eos"))


def create_gguf_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template of the file, or None if it has none."""
    file = GGUFFile.open(path)
    source = file.get("tokenizer.chat_template", str)
    if not source:
        return None
    tokens = _string_list(file, "tokenizer.ggml.tokens")
    return ChatTemplate(source, _token(file, tokens, "bos") or "", _token(file, tokens, "eos") or "")


def _build_byte_level(file: GGUFFile, tokens: list[str]) -> Backend:
    """Byte-level BPE, the kind of GPT-2, Llama 3, Qwen and SmolLM."""
    name = file.get("tokenizer.ggml.pre", str) or "default"
    if name not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}. "
            "A folder with tokenizer.json can be given instead with --tokenizer"
        )
    parts = (merge.partition(" ") for merge in _string_list(file, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in parts]
    model = models.BPE(_vocabulary(tokens), merges, fuse_unk=False, ignore_merges=name == "llama-bpe")
    backend = Backend(model)
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_template(file, backend, tokens, begins=name == "llama-bpe")
    return backend


def _build_byte_fallback(file: GGUFFile, tokens: list[str]) -> Backend:
    """SentencePiece BPE with byte pieces, the kind of Llama 1 and 2 and Mistral.

    The file holds scores instead of merges: of all neighbours the pair whose joined piece scores highest is merged
    first. Listing every way to split every piece, by falling score, says the same to a BPE by merges.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.scores is missing or of another length than the tokens")
    vocabulary = _vocabulary(tokens)
    merges = _merges_from_scores(vocabulary, scores)
    unknown = _token(file, tokens, "unknown") or tokens[0]
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_space = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    space = normalizers.Replace(" ", _SPACE_PIECE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_PIECE), space]) if add_space else space
    steps = [decoders.Replace(_SPACE_PIECE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    _add_template(file, backend, tokens, begins=True)
    return backend


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(vocabulary.items(), key=lambda item: -scores[item[1]]):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges.extend(sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]])))
    return merges


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_special_tokens(file: GGUFFile, backend: Backend, tokens: list[str]) -> None:
    types = file.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.token_type is of another length than the tokens")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    user_defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])


def _add_template(file: GGUFFile, backend: Backend, tokens: list[str], *, begins: bool) -> None:
    """Let ``encode`` put the begin and end tokens where the file, or else the kind of tokenizer, wants them."""
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool)
    bos = _token(file, tokens, "bos") if (begins if add_bos is None else add_bos) else None
    eos = _token(file, tokens, "eos") if file.get("tokenizer.ggml.add_eos_token", bool) else None
    if bos is None and eos is None:
        return
    around = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(around)],
    )


def _token(file: GGUFFile, tokens: list[str], role: str) -> str | None:
    index = file.get(f"tokenizer.ggml.{role}_token_id", int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.{role}_token_id is {index}, of {len(tokens)} tokens")
    return tokens[index]


def _string_list(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{file.path}: {key} is missing or no list of strings")
    return value


def _byte_level_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level_words()])


def _words(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def create() -> pre_tokenizers.PreTokenizer:
        splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return create


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _single_digits,
    "llama-bpe": _words(_LLAMA3_WORDS),
    "qwen2": _words(_QWEN2_WORDS),
    "gpt-2": _byte_level_words,
    "default": _words(*_UNNAMED_WORDS),
}

_BUILDERS: dict[str, Callable[[GGUFFile, list[str]], Backend]] = {
    "gpt2": _build_byte_level,
    "llama": _build_byte_fallback,
}
