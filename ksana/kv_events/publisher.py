"""What carries events out of the process."""

from __future__ import annotations

from typing import Protocol


class KVEventPublisher(Protocol):
    """Sends the batches of an :class:`ksana.kv_events.log.EventLog` to whoever subscribes.

    It works on a thread of its own, and reads what is new out of the log (``after``), from where it has got to. One
    that cannot keep up, or has lost its connection, goes on with the oldest batch that is still there; subscribers see
    by the ids that some are missing, and then get what ``EventLog.answer`` says.
    """

    def notify(self) -> None:
        """There is a new batch. Called on the engine's thread after a step: must be quick, and must not raise."""

    def close(self) -> None:
        """Send what is new, for a second at most, then stop. Called once, by any thread."""
