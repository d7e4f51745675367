"""What a step does to the tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ksana.scheduling.beam_search import FinishedBeam
from ksana.scheduling.refusals import no_token_left_error
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


def hand_out_beams(leader: Request, beams: Sequence[FinishedBeam]) -> list[tuple[RequestUpdate, RequestStatus]]:
    """The best beams become the outputs of those that wait for the search of ``leader``; it gets the best one itself.

    Returns:
        For each what it gets, and how it ends. Whoever gets none, because all that could come next is banned, fails.
    """
    ends = []
    for rank, request in enumerate(leader.sequences):
        if rank < len(beams):
            ends.append(_take_over(request, beams[rank], leader))
        else:
            request.error = no_token_left_error()
            ends.append((RequestUpdate(request, [], []), RequestStatus.FINISHED_ERROR))
    return ends


def _take_over(request: Request, beam: FinishedBeam, leader: Request) -> tuple[RequestUpdate, RequestStatus]:
    steps = beam.hypothesis.steps()
    request.score = beam.score
    request.num_cached_tokens = leader.num_cached_tokens
    request.first_scheduled_time = leader.first_scheduled_time
    request.num_preemptions = leader.num_preemptions
    del request.all_token_ids[request.num_prompt_tokens :]
    tokens, end = append_tokens(request, [step.token_id for step in steps])
    assert end is not None and len(tokens) == len(steps), "a beam ends where a request does"
    return RequestUpdate(request, tokens, [step.logprobs for step in steps if step.logprobs is not None]), end
