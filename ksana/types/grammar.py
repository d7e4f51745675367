"""What a structured output must look like, as a request says it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ksana.errors import RequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]

MAX_GRAMMAR_LENGTHS: dict[GrammarKind, int] = {
    "json_object": 0,
    "json_schema": 256 * 1024,
    "regex": 16 * 1024,
    "choice": 64 * 1024,
    "ebnf": 32 * 1024,
}
"""Characters of a grammar by kind. Compilation takes time and memory in proportion, or worse."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the whole text of an answer; equal specs share one compilation.

    Construction checks the kind and the length of the value and raises :class:`RequestError`; what the value means is
    seen when it is compiled.

    Attributes:
        kind: how to read ``value``.
        value: a JSON schema, a regular expression (of the whole text), a JSON list of strings to choose from, or an
            EBNF grammar, in the notation of Lark or in GBNF; empty for ``json_object``.
    """

    kind: GrammarKind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"there are no grammars of the kind {self.kind!r}, only {kinds}", param="grammar")
        limit = MAX_GRAMMAR_LENGTHS[self.kind]
        if not isinstance(self.value, str):
            raise RequestError(f"the {self.kind} must be a text", param="grammar")
        if len(self.value) > limit:
            size = f"{len(self.value)} characters, more than the {limit} that are possible"
            raise RequestError(f"the {self.kind} has {size}", param="grammar")
        if self.kind != "json_object" and not self.value:
            raise RequestError(f"the {self.kind} is empty", param="grammar")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> GrammarSpec:
        """One of ``texts``."""
        return cls("choice", json.dumps(list(texts)))
