"""When the parts of a step begin, seen from outside: a plugin puts a clock around the model that is loaded."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import ModelInputs, StepContext
from ksana.markers import hookimpl
from ksana.models.base import Model
from ksana.types.model import ModelConfig


class TimedModel:
    """A model that notes, by ``time.perf_counter``, when the parts of its last step began and ended."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.forward_started = 0.0
        self.forward_ended = 0.0
        self.logits_ended = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # all that is not timed is the model's own

    def forward(self, inputs: ModelInputs, context: StepContext) -> torch.Tensor:
        """See :class:`ksana.models.base.Model`."""
        self.forward_started = time.perf_counter()
        hidden = self._model.forward(inputs, context)
        self.forward_ended = time.perf_counter()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`ksana.models.base.Model`."""
        logits = self._model.compute_logits(hidden)
        self.logits_ended = time.perf_counter()
        return logits

    def likeliest(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`ksana.models.base.Model`."""
        found = self._model.likeliest(hidden)
        self.logits_ended = time.perf_counter()
        return found


class TimingPlugin:
    """Register it before the model is loaded.

    Attributes:
        model: the loaded model, timed.
        backend: what it computes with.
    """

    model: TimedModel
    backend: KernelBackend

    @hookimpl(wrapper=True)
    def ksana_create_model(
        self, config: ModelConfig, backend: KernelBackend
    ) -> Generator[None, Model | None, TimedModel | None]:
        """Wrap whatever model the other plugins build."""
        model = yield
        if model is None:
            return None
        self.model, self.backend = TimedModel(model), backend
        return self.model
