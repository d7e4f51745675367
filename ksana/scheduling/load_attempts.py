"""For whom a KV connector is asked in vain, and whose loads fail: they are computed before long."""

from __future__ import annotations

from collections.abc import Callable

_MAX_FAILURES = 2
"""Failed loads of a request after which it is computed here, whatever is offered."""


class LoadAttempts:
    """What has been tried for unfinished requests. Those for whom nothing has failed take no room.

    Args:
        timeout_s: seconds that a connector has to answer what it could load.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: dict[str, float] = {}  # when the connector was first asked, and did not know
        self._num_failures: dict[str, int] = {}

    def are_over(self, request_id: str) -> bool:
        """True if nothing is loaded for the request any more."""
        return bool(self._num_failures) and self._num_failures.get(request_id, 0) >= _MAX_FAILURES

    def may_ask_again(self, request_id: str) -> bool:
        """The connector does not know yet; False, and the end of all attempts, if that has lasted too long."""
        now = self._clock()
        if now - self._asked.setdefault(request_id, now) < self._timeout_s:
            return True
        self.end(request_id)
        return False

    def note_answer(self, request_id: str) -> None:
        """The connector has said what it could load."""
        if self._asked:
            self._asked.pop(request_id, None)

    def note_failure(self, request_id: str) -> None:
        """A load of the request has failed."""
        self._num_failures[request_id] = self._num_failures.get(request_id, 0) + 1

    def end(self, request_id: str) -> None:
        """Nothing shall be loaded for the request any more."""
        self._asked.pop(request_id, None)
        self._num_failures[request_id] = _MAX_FAILURES

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._asked.pop(request_id, None)
        self._num_failures.pop(request_id, None)
