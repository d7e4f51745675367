"""What processing hooks may look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ksana.text.chat_template import ChatTemplate
from ksana.text.tokenizer import Tokenizer
from ksana.types.config import KsanaConfig
from ksana.types.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ProcessingContext:
    """The loaded model, as seen by ``ksana_preprocess`` and ``ksana_postprocess``. One for all requests.

    Attributes:
        model_path: folder or file that the model came from.
        max_model_len: most tokens of prompt and output together.
        chat_template: None if the model has none.
    """

    config: KsanaConfig
    model_config: ModelConfig
    model_path: Path
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
