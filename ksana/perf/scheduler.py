"""The scheduler of the measurements."""

from __future__ import annotations

from ksana.kv import KVCacheManager
from ksana.scheduling import Scheduler
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockIds


class RewindableCache(KVCacheManager):
    """The server's cache manager, but what a sliding window has left behind stays until the next step."""

    def commit(self, request: Request) -> None:
        """Nothing is given back: the request is put back to where it stood. There is no prefix cache to fill."""


class PerfScheduler(Scheduler):
    """The server's scheduler, whose requests can be put at any place of their sequence, and back to it after a step.

    What plans a step and takes in its result is inherited, so the time that it takes is the server's.
    """

    def place(self, request: Request, num_computed_tokens: int) -> BlockIds:
        """Let ``request`` run as if its first tokens had been computed; the caller sees to it that they are.

        Returns:
            Its block table, with room for those tokens. The blocks outside a sliding window are there too, until the
            first step gives them back.
        """
        self.add_request(request)
        block_ids = self.kv.admit(request, self.kv.find_prefix(request), num_computed_tokens)
        assert block_ids is not None, "whether the batch fits was checked before"
        self._waiting.remove(request)
        self._running.add(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        return block_ids

    def rewind(self, request: Request, *, num_computed_tokens: int, num_tokens: int) -> None:
        """Take a running request back to where it stood. Its blocks stay, and are written again."""
        request.num_computed_tokens = num_computed_tokens
        del request.all_token_ids[num_tokens:]

    def take_removed_ids(self) -> list[str]:
        """Requests that have ended, and whose rows the worker still holds. Clears the list."""
        removed, self._removed_ids = self._removed_ids, []
        return removed
