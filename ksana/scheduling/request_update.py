"""What a step does to the tokens of a request."""

from __future__ import annotations

from dataclasses import dataclass

from ksana.types.output import TokenLogprobs
from ksana.types.request import Request, RequestStatus


@dataclass(slots=True)
class RequestUpdate:
    """What a step did to a request: its new tokens, and perhaps its end (see ``request.status``).

    ``logprobs`` has an entry for each new token, or is empty if the request did not ask for them.
    """

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs]


def append_tokens(request: Request, tokens: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append tokens up to the one that ends the request; returns those appended, and the end if it has come."""
    all_token_ids = request.all_token_ids
    if len(all_token_ids) >= request.max_total_tokens:
        return [], RequestStatus.FINISHED_LENGTH  # it wanted its prompt computed, and nothing more
    for position, token in enumerate(tokens, 1):
        all_token_ids.append(token)
        if token in request.stop_token_ids:
            request.stop_reason = None if token in request.eos_token_ids else token
            return tokens[:position], RequestStatus.FINISHED_STOPPED
        if len(all_token_ids) >= request.max_total_tokens:
            return tokens[:position], RequestStatus.FINISHED_LENGTH
    return tokens, None
