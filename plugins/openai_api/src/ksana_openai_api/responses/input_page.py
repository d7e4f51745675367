"""``GET /v1/responses/{id}/input_items``: a page of a list that is read from its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ksana.errors import RequestError
from ksana_openai_api.responses.conversation import Item

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


def input_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that ``query`` asks for by ``limit``, ``order`` and ``after``; the latest items first by default.

    Raises:
        RequestError: a parameter is wrong; ``param`` names it.
    """
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = _index_after(ordered, query["after"]) if query.get("after") else 0
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(ordered),
    }


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not (
        given.isascii() and given.isdigit() and len(given) <= len(str(_MAX_LIMIT)) and 1 <= int(given) <= _MAX_LIMIT
    ):
        raise RequestError(f"limit must be an integer from 1 to {_MAX_LIMIT}", param="limit")
    return int(given)


def _index_after(items: Sequence[Item], item_id: str) -> int:
    for number, item in enumerate(items, 1):
        if item["id"] == item_id:
            return number
    raise RequestError(f"after: there is no item {item_id!r}", param="after")
