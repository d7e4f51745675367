"""Blocks that belong to no request any more, and that a transfer may still read or write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ksana.types.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    request: Request
    deadline: float
    free: Callable[[], object]


class KeptBlocks:
    """Keeps blocks until the transfer is over, or until a deadline: a peer that is gone must not keep them for ever.

    Args:
        what: what is waited for, for the log.
        timeout_s: seconds until the deadline.
        clock: seconds, monotonic.
    """

    def __init__(self, what: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: Request, free: Callable[[], object]) -> None:
        """Call ``free`` as soon as the transfer of that request is over."""
        assert request.request_id not in self._kept, f"{request.request_id}: blocks are kept already"
        self._kept[request.request_id] = _Kept(request, self._clock() + self._timeout_s, free)

    def release(self, request_id: str) -> None:
        """The transfer is over. Does nothing if no blocks wait for it."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            kept.free()

    def expire(self, now: float) -> list[Request]:
        """Free what has waited too long; returns whose it was."""
        late = [kept.request for kept in self._kept.values() if kept.deadline <= now]
        if late:
            logger.warning(
                "%s of %d request(s) has not ended within %g s; their blocks are used again all the same",
                self._what,
                len(late),
                self._timeout_s,
            )
        for request in late:
            self.release(request.request_id)
        return late
