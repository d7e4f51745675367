"""Which values the decoding options of a request may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ksana.errors import RequestError
from ksana.types.grammar import GrammarSpec

if TYPE_CHECKING:
    from ksana.types.sampling import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MAX_BEAMS = 32
MAX_NGRAM_SIZE = 1024

_NGRAM_SIZES = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "decoder_no_repeat_ngram_size")

Check = Callable[[object], bool]


def check_sampling(params: SamplingParams) -> None:
    """Raise RequestError with the first field that has an impossible value, or one that goes ill with another's."""
    for name, is_valid, expected in _RULES:
        value = getattr(params, name)
        if not is_valid(value):
            shown = repr(value)
            raise _refusal(name, f"must be {expected}, not {shown if len(shown) <= 80 else shown[:77] + '...'}")
    _check_together(params)


def _check_together(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", f"is {params.min_tokens}, more than the {params.max_tokens} of max_tokens")
    if params.best_of is not None and params.best_of < params.n:
        raise _refusal("best_of", f"is {params.best_of}, less than the {params.n} sequences of n")
    ngrams = [name for name in _NGRAM_SIZES if getattr(params, name)]
    if len(ngrams) > 1:
        raise _refusal(ngrams[1], f"and {ngrams[0]} cannot be set at the same time")
    if params.grammar is not None and params.ignore_eos:
        raise _refusal("ignore_eos", "goes on where a grammar ends; ask for one of the two")
    if params.num_beams > 1:
        _check_beams(params)


def _check_beams(params: SamplingParams) -> None:
    if params.n > params.num_beams:
        raise _refusal("n", f"is {params.n}, more than the {params.num_beams} beams of num_beams")
    if params.grammar is not None:
        raise _refusal("num_beams", "above 1 does not work with a grammar; sample, with n for several answers")
    if params.stop:
        raise _refusal("stop", "strings do not work with num_beams above 1; stop_token_ids do")
    if params.best_of is not None:
        raise _refusal("best_of", "is for sampled sequences; with num_beams above 1, n says how many beams to return")
    if params.max_tokens == 0:
        raise _refusal("num_beams", "above 1 needs max_tokens of at least 1")


def _refusal(field: str, message: str) -> RequestError:
    return RequestError(f"{field} {message}", param=field)


# -- checks of one value ---------------------------------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int, high: float = math.inf) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float, *, above: bool = False) -> Check:
    """From ``low``, or from above it, to ``high``."""

    def is_valid(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return low <= value <= high and not (above and value == low)

    return is_valid


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _strings(most: int, longest: int) -> Check:
    return lambda value: (
        isinstance(value, tuple)
        and len(value) <= most
        and all(isinstance(text, str) and 0 < len(text) <= longest for text in value)
    )


def _integers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_int, value))


def _biases(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_LOGIT_BIASES:
        return False
    is_bias = _number(-100, 100)
    pairs = [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]
    valid = len(pairs) == len(value) and all(_is_int(token) and is_bias(bias) for token, bias in pairs)
    return valid and len({token for token, _ in pairs}) == len(pairs)


def _grammar(value: object) -> bool:
    return isinstance(value, GrammarSpec)


def _early_stopping(value: object) -> bool:
    return isinstance(value, bool) or value == "never"


_ngram_size = (_integer(0, MAX_NGRAM_SIZE), f"an integer from 0 to {MAX_NGRAM_SIZE}")
_penalty = (_number(-2, 2), "a number from -2 to 2")
_logprobs = (_optional(_integer(0, MAX_LOGPROBS)), f"an integer from 0 to {MAX_LOGPROBS}")

_RULES: tuple[tuple[str, Check, str], ...] = (
    ("max_tokens", _optional(_integer(0)), "an integer of at least 0"),
    ("min_tokens", _integer(0), "an integer of at least 0"),
    ("temperature", _number(0, 100), "a number from 0 to 100"),
    ("top_k", _integer(-1), "an integer of at least -1"),
    ("top_p", _number(0, 1, above=True), "a number above 0 and up to 1"),
    ("min_p", _number(0, 1), "a number from 0 to 1"),
    ("seed", _optional(_integer(-(2**63), 2**64 - 1)), "a 64-bit integer"),
    (
        "stop",
        _strings(MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH),
        f"at most {MAX_STOP_STRINGS} non-empty strings of up to {MAX_STOP_STRING_LENGTH} characters",
    ),
    ("stop_token_ids", _integers, "a list of integers"),
    ("logprobs", *_logprobs),
    ("prompt_logprobs", *_logprobs),
    # Wide enough for any use, and narrow enough for no logit to become infinite.
    ("repetition_penalty", _number(0.01, 100), "a number from 0.01 to 100"),
    ("presence_penalty", *_penalty),
    ("frequency_penalty", *_penalty),
    *((name, *_ngram_size) for name in _NGRAM_SIZES),
    (
        "logit_bias",
        _biases,
        f"at most {MAX_LOGIT_BIASES} token ids, each once, with a number from -100 to 100",
    ),
    (
        "bad_words",
        _strings(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        f"at most {MAX_BAD_WORDS} non-empty strings of up to {MAX_BAD_WORD_LENGTH} characters",
    ),
    ("grammar", _optional(_grammar), "a GrammarSpec"),
    ("grammar_after", _integers, "a list of token ids"),
    ("n", _integer(1, MAX_SEQUENCES), f"an integer from 1 to {MAX_SEQUENCES}"),
    ("best_of", _optional(_integer(1, MAX_SEQUENCES)), f"an integer from 1 to {MAX_SEQUENCES}"),
    ("num_beams", _integer(1, MAX_BEAMS), f"an integer from 1 to {MAX_BEAMS}"),
    ("length_penalty", _number(-10, 10), "a number from -10 to 10"),
    ("early_stopping", _early_stopping, 'true, false or "never"'),
)
"""Field, check, and what a message says that it must be."""
