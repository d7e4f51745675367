"""The tokenizer and chat template of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.text.chat_template import ChatTemplate
from ksana.text.tokenizer import FastTokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def create_hf_tokenizer(folder: Path) -> FastTokenizer | None:
    """Create the tokenizer of ``folder``, or return None if it has no file of any kind known here.

    Raises:
        ModelLoadError: a file is damaged or cannot be converted.
    """
    settings = _read_settings(folder)
    if (folder / TOKENIZER_FILE).is_file():
        backend = _read_tokenizer(folder / TOKENIZER_FILE)
        _apply_settings(backend, settings)
    elif any((folder / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        backend = _convert(folder)
    else:
        return None
    return FastTokenizer(backend, _token(settings, "bos_token"), _token(settings, "eos_token"))


def create_hf_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of ``folder``, or None if it has none."""
    settings = _read_settings(folder)
    path = folder / CHAT_TEMPLATE_FILE
    source = path.read_text(encoding="utf-8") if path.is_file() else _default_template(settings, folder)
    if source is None:
        return None
    return ChatTemplate(source, _token(settings, "bos_token") or "", _token(settings, "eos_token") or "")


def _default_template(settings: dict[str, Any], folder: Path) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{folder / TOKENIZER_CONFIG_FILE}: chat_template must be a string or a list of them")
    return template


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(settings).__name__}")
    return settings


def _read_tokenizer(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ModelLoadError(f"{path}: damaged tokenizer file: {error}") from error


def _apply_settings(backend: Backend, settings: dict[str, Any]) -> None:
    """Mark the special tokens of ``tokenizer_config.json`` that ``tokenizer.json`` knows as ordinary ones.

    Tokens without an id are left out: the model has no row for them. ``add_bos_token`` and its like are for building a
    tokenizer from older formats; in ``tokenizer.json`` the post-processor has the last word.
    """
    named = [_token(settings, key) for key in _SPECIAL_TOKENS]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    if isinstance(extra, list):
        named += [_content(token) for token in extra]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = [t for t in named if t is not None and t not in special and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(known)])


def _convert(folder: Path) -> Backend:
    """Let transformers convert an older tokenizer format, for example ``tokenizer.model``."""
    try:
        from transformers import AutoTokenizer

        backend: Backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
        return backend
    except Exception as error:  # whatever the conversion stumbles over, the way out is the same
        raise ModelLoadError(f"{folder}: the tokenizer cannot be converted to {TOKENIZER_FILE}: {error}") from error


def _token(settings: dict[str, Any], key: str) -> str | None:
    return _content(settings.get(key))


def _content(token: object) -> str | None:
    """A special token is written as a string or as an object with its properties."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
