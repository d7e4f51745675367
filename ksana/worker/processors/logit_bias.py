"""Numbers added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ksana.types.step import NewRequestData


class LogitBias:
    """Adds what ``SamplingParams.logit_bias`` says. A banned token stays banned: nothing is added up to so much."""

    def __init__(self) -> None:
        self._biases: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, request: NewRequestData) -> bool:
        """Take over the biases of a request that has some."""
        biases = request.sampling.logit_bias
        if not biases:
            return False
        tokens, values = zip(*biases, strict=True)
        self._biases[request.request_id] = np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32)
        return True

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._biases[request_id]

    def accept(self, request_id: str, token_id: int) -> None:
        """Biases do not depend on what is generated."""

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Add to all rows at once."""
        found = [(row, *self._biases[i]) for row, i in enumerate(request_ids) if i in self._biases]
        rows = np.repeat([row for row, _, _ in found], [len(tokens) for _, tokens, _ in found])
        tokens = np.concatenate([tokens for _, tokens, _ in found])
        values = np.concatenate([values for _, _, values in found])
        index = torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
        logits[index] += torch.from_numpy(values).to(logits.device)
