"""What the engine asks of a library for constrained decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ksana.types.grammar import GrammarSpec

if TYPE_CHECKING:
    import numpy as np


class GrammarMatcher(Protocol):
    """One text on its way through a grammar. Belongs to one thread."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may come next.

        A text that is complete may be followed by an end-of-sequence token. If the grammar has become too complex to
        follow, or a token was accepted that does not fit, nothing may come.

        Args:
            mask: int32 [ceil(vocab_size / 32)], contiguous. Bit ``i % 32`` of element ``i // 32`` is set if token i may
                come; never for a token without text, be it special or an id that is mere padding.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The text goes on with ``token_id``."""
        ...


class Grammar(Protocol):
    """A compiled grammar, kept for all requests that ask for the same. Safe to use from several threads."""

    def matcher(self) -> GrammarMatcher:
        """Begin a text. Cheap: called whenever a request starts, or comes back after a preemption."""
        ...


class GrammarCompiler(Protocol):
    """Makes grammars for the vocabulary of one model. Safe to use from several threads."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile; called on a thread that may take its time, but cannot be stopped.

        Raises:
            RequestError: the specification is wrong, asks for what the library cannot do, or is too complex.
        """
        ...
