"""Stop strings in a stream of text."""

from __future__ import annotations

from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be sent, and the stop string that has ended the stream, if one has."""

    text_to_emit: str
    matched: str | None


class _Automaton:
    """Knuth-Morris-Pratt matching of one stop string: constant work a character on average, whatever the text.

    The failure table grows with the longest match so far: most stop strings never get beyond their first characters,
    and a thousand requests with sixteen long ones each must not hold up the step that adds them.
    """

    __slots__ = ("failure", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        """Length of the longest prefix of ``stop`` that the text now ends with."""
        self.failure = [0]

    def _step(self, state: int, character: str) -> int:
        while state and self.stop[state] != character:
            state = self.failure[state - 1]
        return state + 1 if self.stop[state] == character else 0

    def push(self, character: str) -> int:
        self.state = state = self._step(self.state, character)
        failure = self.failure
        if state > len(failure):
            failure.append(self._step(failure[-1], self.stop[state - 1]))
        return state


class StopMatcher:
    """Finds the first stop string of a stream and holds back no more than what may become one.

    The match that is complete first wins, and of those that complete with the same character the longest: the only
    rule under which the result does not depend on how the text is cut, and nothing is generated past a match.
    Held back is the longest suffix that is a proper prefix of some stop string. After a match nothing is emitted.

    Args:
        stops: non-empty strings; none make the matcher a pass-through.
        include: emit the matched string itself too.
    """

    __slots__ = ("_automata", "_first_characters", "_held", "_include", "_matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Take the next piece of the stream."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._held and self._first_characters.isdisjoint(text):
            return StopResult(text, None)
        for index, character in enumerate(text):
            match = self._step(character)
            if match is not None:
                return self._stop(self._held + text[: index + 1], match)
        return self._release(self._held + text)

    def finish(self) -> str:
        """The stream has ended: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        match = None
        for automaton in self._automata:
            if automaton.push(character) == len(automaton.stop) and (match is None or len(automaton.stop) > len(match)):
                match = automaton.stop
        return match

    def _stop(self, text: str, match: str) -> StopResult:
        self._matched = match
        self._held = ""
        return StopResult(text if self._include else text[: -len(match)], match)

    def _release(self, text: str) -> StopResult:
        keep = max(automaton.state for automaton in self._automata)
        end = len(text) - keep
        self._held = text[end:]
        return StopResult(text[:end], None)
