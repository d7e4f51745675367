"""Grammars by llguidance, see https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from ksana.errors import RequestError
from ksana.text.tokenizer import Tokenizer
from ksana.types.grammar import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs alone

logger = logging.getLogger(__name__)

_WHITESPACE = r" |\n[ \t]{0,20}"
"""Between the parts of a JSON text: a space, or a new line with its indentation. A weak model that may write as many
blanks as it likes writes nothing else."""

_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}

_LIMITS = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)
"""The library's own limits of work in a compilation and a step, and one on memory: a state takes up to 2 kB."""


_MAX_DIVISOR = 100_000
"""Of the ``multipleOf`` of a schema, taken together: compilation takes seconds beyond."""

_MAX_FIRST_MASK_S = 0.05
"""Processor time for the first mask. Masks usually take a thousandth of that."""

_BASE_S, _TOKEN_S = 0.25, 0.005
"""Processor time that a text may take for its masks: so much, and so much more for each of its tokens."""


class GuidanceCompiler:
    """:class:`ksana.text.grammar.GrammarCompiler` on llguidance.

    Args:
        tokenizer: whose tokens are known as bytes (``is_byte_exact``).
        vocab_size: columns of the logits, at least as many as the tokenizer has tokens.
        eos_token_ids: tokens that end a text, at least one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> GuidanceGrammar:
        """Compile ``spec``. Raises RequestError if it is wrong or too complex."""
        try:
            grammar = _to_guidance(spec)
        except (ValueError, RecursionError) as error:
            raise _refusal(spec, str(error)) from None
        with self._lock:
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        self._try_out(spec, matcher.deep_copy())
        return GuidanceGrammar(matcher)

    def _try_out(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        """Some problems show only when a text begins."""
        mask = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        started = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or not mask.any():
            raise _refusal(spec, "no text fits it")
        if time.thread_time() - started > _MAX_FIRST_MASK_S:
            raise _refusal(spec, "it is too complex")

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Takes some tenths of a second, so it waits for the first grammar."""
        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids))
        return LLTokenizer(wrapped, eos_token=list(self._eos_token_ids))


class GuidanceGrammar:
    """A compiled grammar.

    Args:
        start: at the beginning of a text; never moved.
    """

    def __init__(self, start: LLMatcher) -> None:
        # Copies share what they find out about the lexer, so the second text of a grammar has its masks sooner.
        self._start = start

    def matcher(self) -> GuidanceMatcher:
        """Begin a text."""
        return GuidanceMatcher(self._start.deep_copy())


class GuidanceMatcher:
    """One text. One that costs too much ends, since everybody's step waits for its masks."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._left_s = _BASE_S
        self._failed = False

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may come next into int32 ``mask``."""
        if not self._failed:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._left_s += _TOKEN_S - (time.thread_time() - started)
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
            elif self._left_s < 0:
                self._fail("its masks take too long")
        if self._failed:
            mask[:] = 0

    def accept(self, token_id: int) -> None:
        """Go on with ``token_id``."""
        if not self._failed and not self._matcher.consume_token(token_id):
            self._fail(self._matcher.get_error())

    def _fail(self, problem: str) -> None:
        self._failed = True
        logger.warning("a grammar cannot be followed any further: %s", _in_one_line(problem))


class _Vocabulary:
    """What llguidance asks of a tokenizer. Ids beyond the tokenizer's own have no text and are never let through."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) or b"" for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _to_guidance(spec: GrammarSpec) -> str:
    """The library's form of a grammar. Raises ValueError."""
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if spec.kind == "json_schema":
        _check_schema(json.loads(spec.value))
        return LLMatcher.grammar_from_json_schema(spec.value, overrides=_JSON_OPTIONS)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_escape, _choices(spec.value))))
    return grammar_from(spec.kind, spec.value)


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError("it must be an object")
    # The library's work grows with the digits of the number, without their point, and with several at once.
    digits = {abs(int("".join(map(str, Decimal(str(value)).as_tuple().digits)))) for value in _divisors(schema)}
    if math.lcm(*filter(None, digits)) > _MAX_DIVISOR:
        raise ValueError("its multipleOf is too large a number, or several of them are together")


def _divisors(value: Any) -> Iterator[int | float]:
    """What stands behind each ``multipleOf``, wherever it is."""
    if isinstance(value, list):
        for item in value:
            yield from _divisors(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "multipleOf" and isinstance(item, (int, float)):
                yield item
            else:
                yield from _divisors(item)


def _choices(value: str) -> list[str]:
    texts = json.loads(value)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("not a JSON list of at least one text, none of them empty")
    return texts


def _escape(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _refusal(spec: GrammarSpec, problem: str) -> RequestError:
    return RequestError(
        f"the {spec.kind} cannot be used: {_in_one_line(problem)}", code="invalid_grammar", param="grammar"
    )


def _in_one_line(message: str) -> str:
    """The first line, and behind it the reason that the parser of regular expressions gives further down."""
    first, *others = message.strip().splitlines() or [""]
    reason = next((line for line in others if line.startswith("error: ")), "")
    return f"{first[:300]} {reason.removeprefix('error: ')}".strip()[:500]
