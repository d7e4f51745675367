"""What guesses the tokens that a request is about to generate."""

from __future__ import annotations

from typing import Protocol

from ksana.types.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of requests, for the model to verify several of them in one step.

    A guess costs time and nothing else: what a request answers does not depend on it. One thread calls, the engine's.
    Every method but :meth:`propose` is called whether there is room for drafts at that moment or not. A drafter keeps
    bounded memory, and forgets a request with :meth:`finish`. Equal calls in equal order have equal answers.
    """

    def start(self, request: Request) -> None:
        """Get to know a request: it has generated its first token. ``request.all_token_ids`` grows from now on."""
        ...

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most ``limit`` (>= 1) tokens that may come after ``request.all_token_ids``; [] if there is no guess.

        Called for each request in each step, so it must not take longer than some dozens of microseconds.
        """
        ...

    def update(self, request: Request, new_token_ids: list[int]) -> None:
        """The request has generated ``new_token_ids``; ``request.all_token_ids`` ends with them."""
        ...

    def finish(self, request: Request) -> None:
        """The request has ended. Called at most once for each that was started."""
        ...
