"""Decoding options under the original engine's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from ksana.errors import RequestError
from ksana.types.sampling import SamplingParams

_UNLIMITED = -1


@dataclass(slots=True)
class SamplingConfig:
    """A mutable form of :class:`ksana.types.sampling.SamplingParams` for ``KsanaPlugin``.

    Attributes:
        topk: keep the k likeliest tokens; 0 keeps all, 1 is greedy.
        topp, min_p, temperature, seed, ignore_eos: as in ``SamplingParams``.
        do_sample: False is greedy; None leaves it to ``topk`` and ``temperature``.
        max_new_tokens: most tokens to generate; -1 means until the model's length limit.
        logprobs: k reports the log probability of each generated token, and of the k likeliest beside it.
        stop_strings, stop_token_ids: what ends the text beside the model's own end-of-sequence tokens.
        min_tokens, repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size,
            encoder_no_repeat_ngram_size, decoder_no_repeat_ngram_size, bad_words, num_beams, length_penalty,
            early_stopping: as in ``SamplingParams``.
        logit_bias: numbers by token id.
        num_return_sequences: sequences to sample, or beams to return.

    The fields after these exist in the original and are not available in this version: only their defaults pass.
    """

    topk: int = 0
    topp: float = 1.0
    temperature: float = 1.0
    do_sample: bool | None = None
    max_new_tokens: int = _UNLIMITED
    min_p: float = 0.0
    seed: int | None = None
    stop_strings: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    decoder_no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[str] = field(default_factory=list)
    num_return_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    enable_structured_output: bool = False
    json_schema: str = ""
    enable_thinking: bool = True

    @classmethod
    def from_params(cls, params: SamplingParams) -> SamplingConfig:
        """Show the options of a request."""
        return cls(
            topk=params.top_k,
            topp=params.top_p,
            temperature=params.temperature,
            max_new_tokens=_UNLIMITED if params.max_tokens is None else params.max_tokens,
            min_p=params.min_p,
            seed=params.seed,
            stop_strings=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs or 0,
            logit_bias=dict(params.logit_bias),
            bad_words=list(params.bad_words),
            num_return_sequences=params.n,
            **{name: getattr(params, name) for name in _SAME_IN_BOTH},
        )

    def to_params(self, base: SamplingParams) -> SamplingParams:
        """Take the values over into ``base``; what has no field here stays as it is.

        Raises:
            RequestError: a value is out of range, or a field is set that is not available.
        """
        for name, default in _UNAVAILABLE.items():
            if getattr(self, name) != default:
                raise RequestError(f"sampling_config.{name} is not available in this version", param=name)
        return replace(
            base,
            top_k=1 if self.do_sample is False else self.topk,
            top_p=self.topp,
            temperature=self.temperature,
            max_tokens=None if self.max_new_tokens == _UNLIMITED else self.max_new_tokens,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop_strings),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs or None,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=tuple(self.bad_words),
            n=self.num_return_sequences,
            **{name: getattr(self, name) for name in _SAME_IN_BOTH},
        )


_SAME_IN_BOTH = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "decoder_no_repeat_ngram_size",
    "num_beams",
    "length_penalty",
    "early_stopping",
)
"""Options that are called, and mean, the same here and there."""

_FIRST_UNAVAILABLE = "enable_structured_output"
_NAMES = [f.name for f in fields(SamplingConfig)]
_UNAVAILABLE = {name: getattr(SamplingConfig(), name) for name in _NAMES[_NAMES.index(_FIRST_UNAVAILABLE) :]}
"""Fields that are not available, with the one value that passes."""
