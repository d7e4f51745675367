"""What a route handler says about itself, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

_MARK = "_ksana_operation"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route, as its handler describes it.

    Attributes:
        summary: one line for readers.
        request: pydantic model that validates the body; None: there is no body.
        response: what a whole answer is, of any type that pydantic knows; None: some JSON object.
        media_type: of a whole answer.
        stream: media type of a streamed answer; empty: it is never streamed.
    """

    summary: str
    request: type | None = None
    response: Any = None
    media_type: str = "application/json"
    stream: str = ""


def describes(
    summary: str,
    *,
    request: type | None = None,
    response: Any = None,
    media_type: str = "application/json",
    stream: str = "",
) -> Callable[[HandlerT], HandlerT]:
    """Decorate a route handler (a function or a method) with its :class:`Operation`.

    Example::

        @describes("Count the tokens of a text", request=CountRequest, response=CountResponse)
        async def count(request: web.Request) -> web.Response: ...
    """
    operation = Operation(summary, request, response, media_type, stream)

    def mark(handler: HandlerT) -> HandlerT:
        setattr(handler, _MARK, operation)
        return handler

    return mark


def operation_of(handler: object) -> Operation:
    """What ``handler`` says about itself, or the little that is true of every route."""
    known = getattr(handler, _MARK, None)
    return known if isinstance(known, Operation) else Operation("A route of a plugin", media_type="*/*")
