"""What the worker needs of a model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ksana.kernels.batch import ModelInputs, StepContext
from ksana.kernels.quantization import Weight
from ksana.types.model import ModelConfig


class Model(Protocol):
    """A decoder-only language model, written against :class:`ksana.kernels.base.KernelBackend`."""

    config: ModelConfig

    def load_weight(self, name: str, weight: Weight) -> bool:
        """Take one weight under its Hugging Face name.

        Args:
            weight: quantised only if ``config.quantization`` says that files' weights are to stay so.

        Returns:
            False if the model has no such weight.

        Raises:
            ModelLoadError: the shape is not the expected one.
        """
        ...

    def num_weights(self) -> int:
        """How many weights :meth:`load_weight` expects, to show progress by."""
        ...

    def finish_loading(self) -> list[str]:
        """All weights have been offered: pack them. Returns the names of those that are missing."""
        ...

    def rotary_tables(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``rotary`` of :class:`StepContext` for int64 positions [T]."""
        ...

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        """Hidden states of ``inputs.output_rows`` after the last layer, before the final norm: [n, hidden_size].

        Keys and values of all tokens go into the cache.
        """
        ...

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm between the last layer and the head, [n, hidden_size] -> [n, hidden_size]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, [n, hidden_size] -> float32 logits [n, vocab_size]."""
        ...

    def likeliest(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`KernelBackend.argmax` of :meth:`compute_logits`, for when nobody needs the logits themselves."""
        ...
