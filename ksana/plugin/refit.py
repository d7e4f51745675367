"""Embeddings that a ``KsanaPlugin`` puts in the place of prompt tokens."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana.types.request import InputEmbedding

if TYPE_CHECKING:
    import numpy as np

_PARAM = "input_refit_embedding"


@dataclass(slots=True)
class InputRefitEmbedding:
    """Entry i replaces the embeddings of the prompt tokens from ``pos[i]`` on.

    Attributes:
        pos: first replaced token of each entry.
        embeddings: entries as flat lists of floats, rows one after another.
        embedding_tensors: entries as torch tensors or numpy arrays, [n, hidden_size] or flat. Use one of the two.
        additional_tensors: part of the original's interface; not available, leave it empty.
    """

    pos: list[int] = field(default_factory=list)
    embeddings: list[Any] = field(default_factory=list)
    embedding_tensors: list[Any] = field(default_factory=list)
    additional_tensors: list[Any] = field(default_factory=list)

    @classmethod
    def from_embeddings(cls, embeddings: list[InputEmbedding]) -> InputRefitEmbedding:
        """Show what the client has sent; its rows appear as ``embedding_tensors``."""
        return cls([entry.position for entry in embeddings], [], [entry.rows for entry in embeddings])

    def to_embeddings(self, hidden_size: int) -> list[InputEmbedding]:
        """Convert to the engine's form: float32 rows of shape [n, hidden_size].

        Raises:
            RequestError: the lists do not fit each other, or an entry does not fit ``hidden_size``.
        """
        if self.additional_tensors:
            raise RequestError(f"{_PARAM}.additional_tensors is not available in this version", param=_PARAM)
        if self.embeddings and self.embedding_tensors:
            raise RequestError(f"{_PARAM}: give either embeddings or embedding_tensors, not both", param=_PARAM)
        entries = self.embeddings or self.embedding_tensors
        if len(entries) != len(self.pos):
            raise RequestError(
                f"{_PARAM}: {len(self.pos)} positions for {len(entries)} embeddings; the numbers must be equal",
                param=_PARAM,
            )
        return [_convert(pos, rows, hidden_size) for pos, rows in zip(self.pos, entries, strict=True)]


def _convert(pos: Any, values: Any, hidden_size: int) -> InputEmbedding:
    try:
        position = operator.index(pos)
        rows = _to_array(values)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{_PARAM}: an entry is not numeric: {error}", param=_PARAM) from error
    if position < 0 or rows.size == 0 or rows.size % hidden_size or (rows.ndim > 1 and rows.shape[-1] != hidden_size):
        raise RequestError(
            f"{_PARAM}: an entry at position {position} of shape {list(rows.shape)} does not fit: positions count from "
            f"0, and rows have {hidden_size} numbers",
            param=_PARAM,
        )
    return InputEmbedding(position, rows.reshape(-1, hidden_size))


def _to_array(values: Any) -> np.ndarray:
    import numpy as np  # here, so that commands which run no plugin start without it

    if hasattr(values, "detach"):  # a torch tensor, wherever it lives; numpy has no bfloat16
        values = values.detach().cpu().float().numpy()
    return np.array(values, dtype=np.float32)  # a copy: the plugin may use its buffer again for the next request
