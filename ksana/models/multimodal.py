"""Models of text and images, of which the text part is served."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ksana.errors import ModelLoadError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("Gemma3ForConditionalGeneration",)

_TEXT_CONFIG = "text_config"
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys of the whole model that hold for its text part, whatever that says itself."""

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_TEXT_PART = "language_model."

T = TypeVar("T")


def text_settings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The keys of the text part in the ``config.json`` at ``path``.

    Raises:
        ModelLoadError: it has no such part.
    """
    settings = config.get(_TEXT_CONFIG)
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path}: {_TEXT_CONFIG} is missing or no JSON object")
    logger.info("%s: only the text part of this model is served; it will not see images", path)
    return {**settings, **{key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}}


def text_weights(weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Weights of the text part, under the names that they have in a model of text alone."""
    for name, weight in weights:
        # Older files say `language_model.model.X` and `language_model.lm_head.X`, newer ones `model.language_model.X`.
        part = name.removeprefix("model.")
        if not part.startswith(_OTHER_PARTS):
            yield part.removeprefix(_TEXT_PART), weight
