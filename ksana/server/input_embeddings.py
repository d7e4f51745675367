"""Rows of numbers that replace the embeddings of prompt tokens: ``input_refit_embedding`` of the native API."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast

from ksana.errors import RequestError
from ksana.types.request import InputEmbedding

Embeddings = Annotated[list[list[Any]] | None, FailFast()]
"""Numbers, whose conversion to an array checks them faster than a model would."""


class InputRefitEmbedding(BaseModel):
    """Rows that replace prompt embeddings: entry i, flat or as a list of rows, starts at token ``pos[i]``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    pos: Annotated[list[int] | None, FailFast()] = None
    embeddings: Embeddings = None


def input_embeddings(
    refit: InputRefitEmbedding, hidden_size: int, param: str = "input_refit_embedding"
) -> list[InputEmbedding]:
    """Arrays of what a client has sent; whether the positions lie in the prompt is seen at admission.

    Args:
        hidden_size: elements of a row.
        param: where in the body ``refit`` is.

    Raises:
        RequestError: the numbers do not make rows, or a position is negative.
    """
    positions, embeddings = refit.pos or [], refit.embeddings or []
    if len(positions) != len(embeddings):
        raise RequestError(
            f"{param} has {len(positions)} positions for {len(embeddings)} embeddings; there must be one each",
            param=param,
        )
    for index, position in enumerate(positions):
        if position < 0:
            raise RequestError(f"position {position} is negative", param=f"{param}.pos[{index}]")
    return [
        InputEmbedding(position, _rows(rows, hidden_size, f"{param}.embeddings[{index}]"))
        for index, (position, rows) in enumerate(zip(positions, embeddings, strict=True))
    ]


def _rows(rows: list[Any], hidden_size: int, param: str) -> np.ndarray:
    """Rows, flat or each in a list. Not by ``np.array``, which makes a huge table of text where there is a string."""
    nested = bool(rows) and isinstance(rows[0], list)
    try:
        if nested and any(len(row) != hidden_size for row in rows):
            raise TypeError
        given = np.asarray(array("d", chain.from_iterable(rows) if nested else rows))
    except (TypeError, OverflowError):
        given = np.empty(0)
    if given.size == 0 or given.size % hidden_size:
        raise RequestError(f"{param} must be rows of {hidden_size} numbers, the model's hidden size", param=param)
    with np.errstate(over="ignore"):
        numbers = given.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise RequestError(f"{param} has numbers beyond the range of float32", param=param)
    return numbers.reshape(-1, hidden_size)
