"""How many tokens to draft for whom, so that drafts pay: by how often they were accepted, and by what a row costs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ksana.scheduling.drafter import Drafter
from ksana.types.config import SpeculationConfig
from ksana.types.request import Request

_PRIOR = 0.5
"""What is taken for the chance of a draft of which nothing is known."""

_WEIGHT = 0.25
"""Of the latest draft, in the average over those of a request."""

_PAUSE = 32
"""Steps without drafts after which bad experience is forgotten, and they are tried again."""


def draft_length(chance: float, num_requests: int, step_overhead: float, limit: int) -> int:
    """The number of tokens to draft for each request, at most ``limit``, that makes most tokens a second.

    A step of n rows takes the time of ``step_overhead`` + n rows. One more draft makes it longer by a row for each
    request, and is a token if all drafts before it and it are accepted. It pays as long as it has more tokens for its
    rows than the whole step has up to there.

    Args:
        chance: that a draft is accepted, if those before it are. 0 to 1.
        num_requests: that decode in the step.
        step_overhead: what a step costs beside its rows, in rows.
    """
    accepted, tokens = chance, 1.0
    for length in range(limit):
        if accepted * (step_overhead + num_requests * (length + 1)) <= num_requests * tokens:
            return length
        tokens += accepted
        accepted *= chance
    return limit


@dataclass(slots=True)
class _Pace:
    """What is known of the drafts of one request.

    Attributes:
        chance: estimate that a draft is accepted, if those before it are.
        idle: steps since the last draft.
    """

    chance: float = _PRIOR
    idle: int = 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from the verified drafts: those accepted, and the first that was not."""
        self.idle = 0
        self.chance = 1.0 - (1.0 - self.chance) * (1.0 - _WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            self.chance *= 1.0 - _WEIGHT

    def advance(self) -> None:
        """A step has been computed."""
        self.idle += 1
        if self.idle > _PAUSE:
            self.chance = max(self.chance, _PRIOR)


class Speculator:
    """Asks a drafter for as many tokens as are likely to pay, and learns from what became of them.

    Args:
        drafter: guesses.
        config: limits, and what a step costs.

    Attributes:
        max_tokens: most tokens drafted for a request at a time.
    """

    def __init__(self, drafter: Drafter, config: SpeculationConfig) -> None:
        self._drafter = drafter
        self._config = config
        self.max_tokens = config.num_speculative_tokens
        self._paces: dict[str, _Pace] = {}

    def propose(self, request: Request, num_requests: int, limit: int) -> list[int]:
        """Draft tokens that may follow the request's own, at most ``limit``, in a step of ``num_requests``.

        None if ``limit`` leaves no room for any. A token that would end the request is not drafted: it needs no
        successor, and so the end is never among the accepted drafts.
        """
        length = self._length(request, num_requests, min(limit, self.max_tokens))
        if length <= 0:
            return []
        draft = self._drafter.propose(request, length)
        return list(itertools.takewhile(lambda token: token not in request.stop_token_ids, draft))

    def may_propose(self, request: Request, num_requests: int) -> bool:
        """True if :meth:`propose` would ask the drafter, so that it is worth to wait for the request's next token."""
        return self._length(request, num_requests, limit=1) > 0

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        """The request has generated tokens."""
        pace = self._paces.get(request.request_id)
        if pace is None:
            self._paces[request.request_id] = _Pace()
            self._drafter.start(request)
        else:
            pace.advance()
            self._drafter.update(request, new_token_ids)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> int:
        """Of the drafts of a step, so many were accepted; returns how many were not."""
        pace = self._paces.get(request.request_id)
        if pace is not None:
            pace.observe(num_drafts, num_accepted)
        return num_drafts - num_accepted

    def finish(self, request: Request) -> None:
        """The request has ended, or never begun."""
        if self._paces.pop(request.request_id, None) is not None:
            self._drafter.finish(request)

    def _length(self, request: Request, num_requests: int, limit: int) -> int:
        """How many tokens to draft; none before the first token is there, and none in a large batch."""
        pace = self._paces.get(request.request_id)
        if pace is None or num_requests > self._config.max_requests:
            return 0
        return draft_length(pace.chance, num_requests, self._config.step_overhead, limit)
