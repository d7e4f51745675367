"""Where the server stands between its start and its end."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """The phases, in the only order in which they can follow each other."""

    LOADING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3


class Lifecycle:
    """The server's phase, which only ever moves forward."""

    def __init__(self, phase: Phase = Phase.LOADING) -> None:
        self._phase = phase

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self._phase

    @property
    def accepts_work(self) -> bool:
        """True while new requests may start."""
        return self._phase is Phase.READY

    def advance(self, phase: Phase) -> None:
        """Move on to ``phase``; a phase that has already passed changes nothing."""
        self._phase = max(self._phase, phase)
