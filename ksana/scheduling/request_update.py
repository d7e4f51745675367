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
    all_token_ids, stop_token_ids = request.all_token_ids, request.stop_token_ids
    room = request.max_total_tokens - len(all_token_ids)
    if room <= 0:
        return [], RequestStatus.FINISHED_LENGTH  # it wanted its prompt computed, and nothing more
    if len(tokens) < room and stop_token_ids.isdisjoint(tokens):
        all_token_ids += tokens
        return tokens, None
    tokens, ended = tokens[:room], RequestStatus.FINISHED_LENGTH
    for count, token in enumerate(tokens, 1):
        if token in stop_token_ids:
            request.stop_reason = None if token in request.eos_token_ids else token
            tokens, ended = tokens[:count], RequestStatus.FINISHED_STOPPED
            break
    all_token_ids += tokens
    return tokens, ended
