"""Events on their way to the client: numbered, and named in a line of their own as this API does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ksana.errors import RequestError
from ksana.server.json_response import dump_json
from ksana.server.streaming import SSE, Framing
from ksana_openai_api.responses.answer import Answer
from ksana_openai_api.responses.items import Event

_FAILED = b"event: response.failed\ndata: "


class EventWriter:
    """Encodes the events of one answer.

    Attributes:
        framing: of the stream. The last event tells of the end, so nothing comes behind it; an answer that goes wrong
            half-way ends with one of its own.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._numbers = count()
        self.framing: Framing = replace(SSE, prefix=_FAILED, terminator=b"", error_body=self._failure)

    def encode(self, events: Sequence[Event]) -> bytes:
        """``events`` as they go over the wire."""
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (event["type"].encode(), dump_json(self._number(event))) for event in events
        )

    def _failure(self, error: RequestError) -> dict[str, Any]:
        return self._number(self._answer.fail(error))

    def _number(self, event: Event) -> dict[str, Any]:
        return {**event, "sequence_number": next(self._numbers)}
