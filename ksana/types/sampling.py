"""What a request asks of the decoder."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ksana.errors import RequestError

MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding options of one request. Construction validates and raises :class:`RequestError` naming the field.

    Attributes:
        max_tokens: most tokens to generate; None means until the model's length limit.
        temperature: 0 is greedy; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all; 1 is greedy.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this. In (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the likeliest. In [0, 1].
        seed: the random numbers follow from it and the token's position alone, whatever else is in the batch. None
            draws one.
        stop: strings that end the text (a single one may be given bare); cut before the match unless
            ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the sequence, beside the model's own end-of-sequence tokens.
        ignore_eos: go on past the model's end-of-sequence tokens (``stop_token_ids`` still hold).
        skip_special_tokens: leave special tokens out of the text.
        logprobs: 0 for none; k reports for each generated token its log probability, and those of the k likeliest.
            They are the model's own, before temperature and filters. At most 20.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        if self.max_tokens is not None:
            _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer of at least 1", self)
        _require(_in_range(self.temperature, 0.0, 100.0), "temperature", "a number from 0 to 100", self)
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer of at least -1", self)
        _require(_in_range(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", "a number above 0 and up to 1", self)
        _require(_in_range(self.min_p, 0.0, 1.0), "min_p", "a number from 0 to 1", self)
        if self.seed is not None:
            valid = _is_int(self.seed) and -(2**63) <= self.seed <= MAX_SEED
            _require(valid, "seed", "a 64-bit integer", self)
        _require(
            isinstance(self.stop, tuple)
            and len(self.stop) <= MAX_STOP_STRINGS
            and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_STRING_LENGTH for s in self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} non-empty strings of up to {MAX_STOP_STRING_LENGTH} characters",
            self,
        )
        valid_logprobs = _is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
        _require(valid_logprobs, "logprobs", f"an integer from 0 to {MAX_LOGPROBS}", self)
        valid_ids = isinstance(self.stop_token_ids, tuple) and all(_is_int(t) for t in self.stop_token_ids)
        _require(valid_ids, "stop_token_ids", "a list of integers", self)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _as_tuple(value: object) -> object:
    """Lists become tuples. A bare string is one string: taken for its characters, the text would end at any of them."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and low <= value <= high


def _require(condition: bool, field: str, expected: str, params: SamplingParams) -> None:
    if not condition:
        value = repr(getattr(params, field))
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise RequestError(f"{field} must be {expected}, not {shown}", param=field)
