"""What a client of Mooncake Store is asked for, and the numbers that it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Addresses = Sequence[Sequence[int]]
"""For each key the addresses of its pieces in memory, which one value is put together of."""

Sizes = Sequence[Sequence[int]]
"""For each key the bytes of its pieces."""

OK = 0
INTERNAL = -1
NO_SEGMENT = -101
NO_SPACE = -200
INVALID = -600
TOO_LONG = INVALID
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
BUSY = -714
TRANSFER_FAILED = -800
DAMAGED = -801
RPC_FAILED = -900
RPC_TIMEOUT = -901
"""Codes of Mooncake that mean something to us; any other negative one is a failure of its own."""

_MEANINGS = {
    INTERNAL: "internal error",
    NO_SEGMENT: "no such segment of memory",
    NO_SPACE: "no space",
    INVALID: "invalid parameters",
    NOT_READY: "not yet written",
    NOT_FOUND: "not found",
    BUSY: "busy",
    TRANSFER_FAILED: "a transfer has failed",
    DAMAGED: "a digest does not fit",
    RPC_FAILED: "the call to the master has failed",
    RPC_TIMEOUT: "the master has not answered in time",
}


def describe(code: int) -> str:
    """A code in words, for the log."""
    return f"Mooncake's error {code}, {_MEANINGS.get(code, 'see its ErrorCode')}"


PASSING = frozenset({NOT_READY, BUSY, TRANSFER_FAILED})
"""Failures that another try may overcome."""

BROKEN = frozenset({TRANSFER_FAILED, RPC_FAILED, RPC_TIMEOUT})
"""Failures of the network or of who is at its other end, as opposed to answers."""


class StoreClient(Protocol):
    """A client of a store: the real one, or the one within a process.

    The methods may be called by several threads at a time. They raise nothing unless they say so, and block no longer
    than a few timeouts.
    """

    def is_reachable(self) -> bool:
        """Whether the master answers; takes a moment, also when it does not."""
        ...

    def connect(self) -> int:
        """Join the store and lend it our segment of memory; called once, before everything that follows.

        Raises:
            ConnectionError: somebody who is needed for it does not answer; says who.
        """
        ...

    def register(self, address: int, size: int) -> int:
        """Allow transfers to and from a region of memory, in bytes."""
        ...

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 for each key that is stored, which then stays for some seconds, 0 for others, negative for failures."""
        ...

    def put(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        """Store values. OK for each that is stored now, by us or by others before."""
        ...

    def get(self, keys: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        """Read values. Their bytes for each that is read, negative for failures."""
        ...

    def remove(self, pattern: str) -> int:
        """Remove what has a key that matches the regular expression, read by somebody just now or not."""
        ...

    def close(self) -> None:
        """Leave the store, with all that lies in our segment. Takes seconds."""
        ...
