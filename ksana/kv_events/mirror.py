"""A consumer's copy of what a cache contains."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.kv_events.content import CacheContent
from ksana.kv_events.wire import encode_id
from ksana.types.kv_events import AllBlocksCleared, EventBatch


class CacheMirror:
    """Applies the batches of one engine, and knows when some are missing.

    It does no I/O: its owner hands it each batch that arrives (:meth:`receive`), sends :meth:`ask` to where the engine
    answers as long as something is missing, and hands over what comes back (:meth:`answer`). The owner also asks when
    for a while no batch has brought anything new: the last one of all may have been lost, or the engine may be another
    one, whose clock was set back.

    A batch that arrives while something is missing is not kept: the answer has it too, or the one after.

    Attributes:
        content: that of the cache, as of ``last_id``.
        last_id: id of the last batch that is part of it; None before the first one.
        is_complete: False if batches are known to be missing.
    """

    def __init__(self) -> None:
        self.content = CacheContent()
        self.last_id: int | None = None
        self.is_complete = False
        self._newest_id = -1  # of what has been received
        self._newest_when_asked = -1

    def receive(self, batch: EventBatch) -> None:
        """A batch has arrived from the stream."""
        self._newest_id = max(self._newest_id, batch.event_id)
        if self.last_id is not None and batch.event_id <= self.last_id:
            return
        if _begins_with_clear(batch) or (self.is_complete and batch.event_id - 1 == self.last_id):
            self._apply(batch)
            self.is_complete = True
        else:
            self.is_complete = False

    def ask(self) -> bytes:
        """A request for what is missing, or for what is new if nothing is. One is answered before the next is sent."""
        self._newest_when_asked = self._newest_id
        return encode_id(0 if self.last_id is None else self.last_id + 1)

    def answer(self, batches: Sequence[EventBatch]) -> None:
        """All batches of the answer to the last request are here: those that were asked for, or a dump."""
        is_whole = bool(batches) and _begins_with_clear(batches[0])
        for batch in batches:
            if is_whole or batch.event_id - 1 == self.last_id:
                self._apply(batch)
        if self.last_id is not None:
            if not batches and self._newest_id == self._newest_when_asked:
                self._newest_id = self.last_id  # what was newer came from an engine that is no more
            self.is_complete = self._newest_id <= self.last_id

    def _apply(self, batch: EventBatch) -> None:
        self.content.apply(batch.events)
        self.last_id = batch.event_id


def _begins_with_clear(batch: EventBatch) -> bool:
    return bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
