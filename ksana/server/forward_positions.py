"""Which positions of a prompt a target of ``/forward`` selects."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ksana.errors import RequestError


def positions_of_slices(slices: Sequence[Sequence[int]], num_tokens: int, param: str) -> list[int]:
    """The positions in intervals that include both ends; negative ends count from the end of the prompt.

    Args:
        slices: pairs of ends.
        param: where in the body they are.

    Returns:
        Positions, ascending, each once.

    Raises:
        RequestError: an interval ends before it starts, reaches out of the prompt, or begins before its predecessor
            ends.
    """
    positions: list[int] = []
    for index, (start, end) in enumerate(slices):
        first, last = (position + num_tokens if position < 0 else position for position in (start, end))
        problem = None
        if last < first:
            problem = "ends before it starts"
        elif first < 0 or last >= num_tokens:
            problem = f"exceeds the {num_tokens} tokens of the prompt"
        elif positions and first <= positions[-1]:
            problem = "overlaps with the one before it: intervals must be in order"
        if problem:
            raise RequestError(f"The interval [{start}, {end}] {problem}", param=f"{param}[{index}]")
        positions.extend(range(first, last + 1))
    return positions


def positions_of_tokens(wanted: Collection[int], token_ids: Sequence[int]) -> list[int]:
    """The positions of all tokens that are among the wanted ones, ascending."""
    ids = frozenset(wanted)
    return [position for position, token in enumerate(token_ids) if token in ids]
