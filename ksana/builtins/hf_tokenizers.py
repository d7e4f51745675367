"""Builtin plugin: tokenizers and chat templates of model folders in the Hugging Face layout, and of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.text.chat_template import ChatTemplate
    from ksana.text.tokenizer import Tokenizer
    from ksana.types.model import ModelConfig


@hookimpl(trylast=True)
def ksana_create_tokenizer(model_path: Path, config: ModelConfig) -> Tokenizer | None:
    """Read ``tokenizer.json``, or convert an older format, or take what a ``.gguf`` file holds."""
    if model_path.is_file():
        from ksana.models.gguf_tokenizer import create_gguf_tokenizer

        return create_gguf_tokenizer(model_path) if model_path.suffix == ".gguf" else None
    from ksana.models.hf_tokenizer import create_hf_tokenizer

    return create_hf_tokenizer(model_path)


@hookimpl(trylast=True)
def ksana_create_chat_template(model_path: Path, config: ModelConfig) -> ChatTemplate | None:
    """Read ``chat_template.jinja`` or ``tokenizer_config.json``, or what a ``.gguf`` file holds."""
    if model_path.is_file():
        from ksana.models.gguf_tokenizer import create_gguf_chat_template

        return create_gguf_chat_template(model_path) if model_path.suffix == ".gguf" else None
    from ksana.models.hf_tokenizer import create_hf_chat_template

    return create_hf_chat_template(model_path)
