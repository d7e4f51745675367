"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ksana.types.sampling import SamplingParams
from ksana.types.step import NewRequestData


class Penalties:
    """Makes tokens that a request has already less likely, or more.

    The repetition penalty is that of Keskar et al. 2019: it divides positive logits and multiplies negative ones, for
    tokens of prompt and output. The other two are OpenAI's: they are subtracted, for tokens of the output.
    """

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}

    def add(self, request: NewRequestData) -> bool:
        """Count the tokens of a request with penalties."""
        sampling = request.sampling
        repetition = sampling.repetition_penalty != 1.0
        if not (repetition or sampling.presence_penalty or sampling.frequency_penalty):
            return False
        output = request.token_ids[request.num_prompt_tokens :]
        prompt = request.token_ids[: request.num_prompt_tokens] if repetition else []
        self._histories[request.request_id] = _History(sampling, prompt, output)
        return True

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._histories[request_id]

    def accept(self, request_id: str, token_id: int) -> None:
        """Count a token."""
        self._histories[request_id].push(token_id)

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Penalise all rows at once."""
        found = [(row, self._histories[i]) for row, i in enumerate(request_ids) if i in self._histories]
        lengths = [len(history.token_ids) for _, history in found]
        rows, device = np.repeat([row for row, _ in found], lengths), logits.device
        tokens = np.concatenate([history.token_ids for _, history in found])
        divisors = np.repeat(np.array([history.repetition for _, history in found], dtype=np.float32), lengths)
        penalties = np.concatenate([history.subtracted() for _, history in found])
        index = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        divisor = torch.from_numpy(divisors).to(device)
        values = logits[index]
        repeated = torch.where(values < 0, values * divisor, values / divisor)
        logits[index] = repeated - torch.from_numpy(penalties).to(device)


class _History:
    """The tokens of one request that are penalised, each once, and how often it has been generated."""

    __slots__ = ("_counts", "_frequency", "_positions", "_presence", "repetition", "token_ids")

    def __init__(self, sampling: SamplingParams, prompt: list[int], output: list[int]) -> None:
        self.repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        # Arrays that grow as lists do, and that numpy reads in place.
        self.token_ids = array("q", dict.fromkeys(prompt))
        self._counts = array("f", bytes(4 * len(self.token_ids)))
        self._positions = {token: position for position, token in enumerate(self.token_ids)}
        for token in output:
            self.push(token)

    def push(self, token_id: int) -> None:
        """Count a generated token."""
        position = self._positions.setdefault(token_id, len(self.token_ids))
        if position == len(self.token_ids):
            self.token_ids.append(token_id)
            self._counts.append(0.0)
        self._counts[position] += 1.0

    def subtracted(self) -> np.ndarray:
        """float32, for each of ``token_ids``: its presence and frequency penalties."""
        counts = np.asarray(self._counts)
        penalties: np.ndarray = counts * np.float32(self._frequency) + (counts > 0) * np.float32(self._presence)
        return penalties
