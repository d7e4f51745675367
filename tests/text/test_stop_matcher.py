from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.text import StopMatcher

text = st.text("ab<", max_size=30)
stop_strings = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=3).map(tuple)


def run(stops: tuple[str, ...], chunks: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    sent, matched = "", None
    for chunk in chunks:
        emitted, matched = matcher.push(chunk)
        sent += emitted
    return sent + matcher.finish(), matched


def expected(stops: tuple[str, ...], whole: str, include: bool) -> tuple[str, str | None]:
    """By definition: the shortest prefix that ends with a stop string, the longest such string."""
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return whole[: end if include else end - len(match)], match
    return whole, None


@given(stops=stop_strings, whole=text, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_the_result_does_not_depend_on_the_cuts(
    stops: tuple[str, ...], whole: str, cuts: list[int], include: bool
) -> None:
    bounds = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    chunks = [whole[a:b] for a, b in pairwise(bounds)]
    assert run(stops, chunks, include) == expected(stops, whole, include)


@given(stops=stop_strings, whole=text)
def test_held_back_is_the_longest_suffix_that_may_become_a_stop(stops: tuple[str, ...], whole: str) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for end in range(1, len(whole) + 1):
        emitted, matched = matcher.push(whole[end - 1])
        sent += emitted
        if matched:
            return
        proper = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((k for k in range(end + 1) if whole[end - k : end] in proper), default=0)
        assert sent == whole[: end - held]


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.push("one STOP two").text_to_emit == "one "
    assert matcher.push("three") == ("", "STOP")
    assert matcher.finish() == ""


def test_without_stops_text_passes_through() -> None:
    assert StopMatcher(()).push("text") == ("text", None)


@pytest.mark.parametrize(("include", "sent"), [(False, "a"), (True, "aEND")])
def test_include(include: bool, sent: str) -> None:
    assert run(("END", "D"), ["aE", "N", "Dz"], include) == (sent, "END")


def test_work_does_not_grow_with_a_hostile_text() -> None:
    # Every character may begin the stop string anew: a search over suffixes would be quadratic.
    stop = "a" * 1023 + "b"
    assert run((stop,), ["a" * 50_000]) == ("a" * 50_000, None)


def test_long_stop_strings_cost_nothing_before_they_begin_to_match() -> None:
    """A call with a thousand prompts and sixteen long stops each would otherwise hold up everybody's next step."""
    matcher = StopMatcher(("ab" * 512,) * 16)
    assert all(len(automaton.failure) == 1 for automaton in matcher._automata)
    matcher.push("abac")
    assert all(len(automaton.failure) == 3 for automaton in matcher._automata)
