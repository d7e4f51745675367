from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from ksana.errors import ModelLoadError
from ksana.models.hf_tokenizer import create_hf_chat_template, create_hf_tokenizer
from ksana.testing.tiny_models import write_tiny_tokenizer

TEXT = "What is <|im_start|> the capital? 你好<|im_end|>"
CHAT = [{"role": "user", "content": "hi"}]


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True}},
        {"additional_special_tokens": ["e"]},
        {"pad_token": "Ġthe"},
    ],
)
@pytest.mark.parametrize("template", [False, True])
def test_equals_transformers(folder: Path, settings: dict[str, Any], template: bool) -> None:
    change_settings(folder, **settings)
    if template:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        backend.save(str(folder / "tokenizer.json"))
    ours, theirs = create_hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    assert (ours.bos_token, ours.eos_token_id) == (theirs.bos_token, theirs.eos_token_id)
    for special in (True, False):
        ids = ours.encode(TEXT, add_special_tokens=special)
        assert ids == theirs.encode(TEXT, add_special_tokens=special)
        assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)


def test_older_format_is_converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    old = tmp_path_factory.mktemp("old")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (old / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    )
    converted, original = create_hf_tokenizer(old), create_hf_tokenizer(folder)
    assert converted is not None
    assert original is not None
    assert converted.encode("What is the capital?") == original.encode("What is the capital?")
    assert converted.eos_token_id == original.eos_token_id


def test_chat_template_equals_transformers(folder: Path) -> None:
    template = create_hf_chat_template(folder)
    assert template is not None
    reference = AutoTokenizer.from_pretrained(folder)
    assert template.render(CHAT) == reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)


def test_chat_template_sources(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named {{ eos_token }}"}]
    change_settings(folder, chat_template=named)
    template = create_hf_chat_template(folder)
    assert template is not None
    assert template.render(CHAT) == "named <|im_end|>"
    (folder / "chat_template.jinja").write_text("file")
    template = create_hf_chat_template(folder)
    assert template is not None
    assert template.render(CHAT) == "file"


def test_absent_files_are_not_ours(tmp_path: Path) -> None:
    assert create_hf_tokenizer(tmp_path) is None
    assert create_hf_chat_template(tmp_path) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_named(folder: Path, file: str) -> None:
    (folder / file).write_text('{"version": ')
    with pytest.raises(ModelLoadError, match=file):
        create_hf_tokenizer(folder)


def test_conversion_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ModelLoadError, match="cannot be converted"):
        create_hf_tokenizer(tmp_path)


def test_tiny_models_repeat(tmp_path: Path) -> None:
    from ksana.testing import tiny_model

    first, second = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_tiny_tokenizer_fits_the_tiny_models(folder: Path) -> None:
    tokenizer = create_hf_tokenizer(folder)
    assert tokenizer is not None
    assert 259 < tokenizer.vocab_size <= 512
