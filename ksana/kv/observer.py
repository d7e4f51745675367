"""Who hears what becomes findable in the KV cache, and what no longer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ksana.types.request import Request


class KVCacheObserver(Protocol):
    """Called on the engine's thread, between a block's change and the next one. Must be quick, and must not raise."""

    def blocks_stored(self, request: Request, group_id: int, first_index: int, block_hashes: Sequence[bytes]) -> None:
        """Full blocks of a request can be found from now on that could not be found before, in one KV cache group.

        Args:
            first_index: place of the first one among the request's blocks; the others follow it without a gap.
            block_hashes: of these blocks.
        """

    def block_removed(self, group_id: int, block_hash: bytes) -> None:
        """A block can no longer be found."""

    def all_blocks_cleared(self) -> None:
        """No block of any group can be found any more."""
