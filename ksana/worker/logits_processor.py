"""What may change logits before a token is drawn: penalties, bans, grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ksana.types.step import NewRequestData


class LogitsProcessor(Protocol):
    """One way of changing logits, for all requests that ask for it; it may keep state for each of them.

    What a row gets must not depend on the other rows. A request may come back after a preemption: :meth:`add` then
    finds its earlier output among its tokens.
    """

    def add(self, request: NewRequestData) -> bool:
        """Start a request. Returns False, and need not remember it, if the request asks nothing of this processor."""
        ...

    def remove(self, request_id: str) -> None:
        """Forget a request that was added with success."""
        ...

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Change rows in place. Only called if one of them is of a request that was added with success.

        Args:
            logits: float32 [n, vocab_size]. A token that must not be drawn gets :data:`BANNED`.
            request_ids: whose each row is, [n]; those that :meth:`add` has declined are among them.
        """
        ...

    def accept(self, request_id: str, token_id: int) -> None:
        """A token has been drawn for a request that was added with success."""
        ...


BANNED = float(torch.finfo(torch.float32).min)
"""A logit that no draw ever takes. Finite, so that differences of two of them are no NaN."""


class LogitsProcessors:
    """The processors of an engine, in the order in which they apply. Most requests have nothing to do with any.

    Args:
        processors: called one after the other.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = tuple(processors)
        self._by_request: dict[str, list[LogitsProcessor]] = {}

    def add(self, request: NewRequestData) -> None:
        """Start a request."""
        interested = [processor for processor in self._processors if processor.add(request)]
        if interested:
            self._by_request[request.request_id] = interested

    def remove(self, request_id: str) -> None:
        """Forget a request. Does nothing if no processor has to do with it."""
        for processor in self._by_request.pop(request_id, ()):
            processor.remove(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def __len__(self) -> int:
        return len(self._by_request)

    def apply(self, logits: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Change float32 rows [n, vocab_size] in place, for the request of each."""
        wanted = {id(processor) for request_id in request_ids for processor in self._by_request[request_id]}
        for processor in self._processors:
            if id(processor) in wanted:
                processor.apply(logits, request_ids)

    def accept_all(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens have been chosen for a request. Does nothing if no processor has to do with it."""
        if request_id in self._by_request:
            for token_id in token_ids:
                self.accept(request_id, token_id)

    def accept(self, request_id: str, token_id: int) -> None:
        """A token has been drawn for a request that some processor has to do with."""
        for processor in self._by_request[request_id]:
            processor.accept(request_id, token_id)
