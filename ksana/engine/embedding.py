"""Embeddings of texts: the states of a prompt's tokens, pooled into one vector of unit length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana.errors import RequestError
from ksana.types.capture import Capture, CapturePlan
from ksana.types.model import ModelConfig
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams


def _last(token_ids: Sequence[int]) -> list[Capture]:
    return [Capture("normed", [len(token_ids) - 1])]


def _cls(token_ids: Sequence[int]) -> list[Capture]:
    return [Capture("normed", [0])]


def _mean(token_ids: Sequence[int]) -> list[Capture]:
    return [Capture("mean", range(len(token_ids)))]


_PLANS: dict[str, CapturePlan] = {"last": _last, "cls": _cls, "mean": _mean}


class Embedder:
    """Makes drafts whose outputs are embeddings.

    Example::

        embedder = Embedder(engine.model_config)
        async with await engine.submit(embedder.draft("a text")) as stream:
            vector = embedder.vector(await stream.result())

    Args:
        config: of the model; says how it pools.
        dimensions: elements of a vector; None for all that the model has. A vector is cut off and then normalised, as
            models that are trained for it expect.

    Attributes:
        dimensions: elements of each vector.

    Raises:
        RequestError: the model's pooling is not supported, or it does not have so many dimensions.
    """

    def __init__(self, config: ModelConfig, dimensions: int | None = None) -> None:
        if config.pooling not in _PLANS:
            raise RequestError(
                f"{config.name} makes embeddings by {config.pooling}, which is not supported; "
                f"supported are {', '.join(_PLANS)}",
                code="unsupported_model",
                param="model",
            )
        if dimensions is not None and not 1 <= dimensions <= config.hidden_size:
            raise RequestError(
                f"dimensions must be from 1 to {config.hidden_size}, not {dimensions}", param="dimensions"
            )
        self._plan = _PLANS[config.pooling]
        self.dimensions = dimensions or config.hidden_size

    def draft(self, prompt: str | list[int], **fields: Any) -> RequestDraft:
        """A draft that computes the prompt, and no token more.

        Args:
            prompt: text or token ids.
            fields: further ones of the draft.
        """
        return RequestDraft(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=SamplingParams(max_tokens=0),
            captures=self._plan,
            final_only=True,
            **fields,
        )

    def vector(self, output: RequestOutput) -> np.ndarray:
        """The embedding in the last output of such a draft: float32 [dimensions], of unit length."""
        [rows] = output.captured
        vector = np.asarray(rows)[0, : self.dimensions].astype(np.float64)
        length = np.linalg.norm(vector)
        normalised: np.ndarray = (vector / length if length else vector).astype(np.float32)
        return normalised
