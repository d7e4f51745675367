"""Responses that are remembered, so that a later request can go on from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana_openai_api.parser_options import OPTION_GROUP
from ksana_openai_api.responses.options import DEFAULT_BYTES, DEFAULT_SIZE

if TYPE_CHECKING:
    from ksana.types.config import KsanaConfig

_OVERHEAD_BYTES = 512
"""What an entry takes beside its JSON: keys, objects and a place in the table."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and all that the model saw for it, as JSON text: that is compact, and its size is known.

    Attributes:
        response: the response object.
        input_items: list of the conversation's items before the answer, instructions left out.
    """

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.response) + len(self.input_items) + _OVERHEAD_BYTES


class ResponseStore:
    """Keeps responses until they are deleted, or others need the room: the one not used for longest goes first.

    Each owner sees its own alone. A response carries its whole conversation, so none depends on another one's stay.

    Args:
        max_entries: responses, of all owners together; 0: nothing is kept.
        max_bytes: their bytes. A response that is larger by itself is not kept.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @classmethod
    def of(cls, config: KsanaConfig) -> ResponseStore:
        """An empty store of the size that the options say."""
        options: dict[str, Any] = dict(config.plugin_options.get(OPTION_GROUP, {}))
        return cls(options.get("response_store_size", DEFAULT_SIZE), options.get("response_store_bytes", DEFAULT_BYTES))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        """False if nothing is ever kept."""
        return self._max_entries > 0 and self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return self._num_bytes

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keep ``stored`` under an id that is new."""
        if not self.is_enabled or stored.num_bytes > self._max_bytes:
            return
        self._entries[owner, response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def get(self, owner: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """The response of that id.

        Args:
            param: the request's field that names it, for the error.

        Raises:
            RequestError: 404: the owner has none of that id.
        """
        stored = self._entries.get((owner, response_id))
        if stored is None:
            raise self._not_found(response_id, param)
        self._entries.move_to_end((owner, response_id))
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Forget the response of that id.

        Raises:
            RequestError: 404: the owner has none of that id.
        """
        stored = self._entries.pop((owner, response_id), None)
        if stored is None:
            raise self._not_found(response_id, None)
        self._num_bytes -= stored.num_bytes

    def _not_found(self, response_id: str, param: str | None) -> RequestError:
        why = "old ones are dropped to make room" if self.is_enabled else "this server keeps none"
        return RequestError(
            f"there is no response {response_id!r}; {why}",
            status=404,
            code="previous_response_not_found" if param else "not_found",
            param=param,
        )
