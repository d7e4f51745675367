"""What a step does with the beams of a search, beside what it does with every request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ksana.kv.manager import KVCacheManager
from ksana.scheduling.beam_search import FinishedBeam
from ksana.scheduling.refusals import no_token_left_error
from ksana.scheduling.request_update import RequestUpdate, append_tokens
from ksana.types.request import Request, RequestStatus
from ksana.types.step import BlockTableUpdate, ModelRunnerOutput, SchedulerOutput

Grow = Callable[[Request, int], "BlockTableUpdate | None"]


def schedule_beams(leader: Request, count: int, grow: Grow, kv: KVCacheManager, step: SchedulerOutput) -> int:
    """All beams of a search go on by ``count`` tokens, or none does.

    Args:
        grow: makes room for tokens of a beam, or takes the blocks of all of them and returns None.

    Returns:
        The tokens scheduled.
    """
    group = leader.beam_group
    assert group is not None
    updates = []
    for beam in group.beams:
        update = grow(beam, beam.num_in_flight + count)
        if update is None:
            return 0
        updates.append(update)
    group.schedule(count, updates, kv, step)
    return count * len(updates)


def update_beams(
    leader: Request, num_scheduled: int, output: ModelRunnerOutput, kv: KVCacheManager
) -> tuple[list[str], list[tuple[RequestUpdate, RequestStatus]]]:
    """Each beam has computed ``num_scheduled`` tokens.

    Returns:
        Ids of beams that are no more, and if the search is done, what each of its requests gets and how it ends, the
        leader first.
    """
    group = leader.beam_group
    assert group is not None
    if leader.status is not RequestStatus.RUNNING:
        return [], []  # preempted meanwhile: beams would go on in blocks that they have lost
    dropped = group.update(num_scheduled, output.candidates, kv)
    return dropped, _hand_out(leader, group.search.finished) if group.search.is_done else []


def leader_of(beam_id: str, running: Iterable[Request]) -> Request | None:
    """The running request that the beam belongs to."""
    return next((r for r in running if r.beam_group is not None and r.beam_group.has_row(beam_id)), None)


def _hand_out(leader: Request, beams: Sequence[FinishedBeam]) -> list[tuple[RequestUpdate, RequestStatus]]:
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
