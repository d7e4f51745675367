"""What a request asks of the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ksana.types.grammar import GrammarSpec
from ksana.types.sampling_checks import check_sampling


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding options of one request. Construction validates and raises :class:`RequestError` naming the field.

    Attributes:
        max_tokens: most tokens to generate; None means until the model's length limit; 0 computes the prompt alone.
        min_tokens: no end-of-sequence token, stop token or stop string ends the text before so many tokens.
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
        logprobs: None for none; k reports for each generated token its log probability, and those of the k likeliest.
            They are the model's own, before penalties, temperature and filters. At most 20.
        prompt_logprobs: the same for each token of the prompt but the first.
        repetition_penalty: of tokens in prompt or output: positive logits are divided, negative ones multiplied by it.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or once for each
            occurrence. From -2 to 2.
        no_repeat_ngram_size: n bans tokens that would repeat n tokens of prompt and output; 0 bans none.
        encoder_no_repeat_ngram_size: the same for n tokens of the prompt alone.
        decoder_no_repeat_ngram_size: the same for n tokens of the output alone. At most one of the three is set.
        logit_bias: (token id, number from -100 to 100) added to logits.
        bad_words: texts that must not appear in the output.
        grammar: what the output must look like.
        grammar_after: the grammar holds from the end of this token sequence on (the end of a reasoning part); empty
            for the beginning.
        n: sequences to sample from one prompt. Sequence i has the seed that follows from ``seed`` and i.
        best_of: sample so many, and give the ``n`` that are likeliest by token; None for ``n``.
        num_beams: above 1, beam search instead of sampling: the ``n`` best of so many beams. It draws nothing, so
            temperature, top_k, top_p, min_p and seed do not matter. Output comes at the end only.
        length_penalty: beams are compared by log probability / length ** length_penalty.
        early_stopping: True ends a beam search at ``num_beams`` finished ones, False when no better is likely,
            "never" when no better is possible.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    decoder_no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    grammar_after: tuple[int, ...] = ()
    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", self.logit_bias.items())
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "grammar_after"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        check_sampling(self)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def num_sequences(self) -> int:
        """Sequences to compute for a prompt."""
        return self.n if self.best_of is None else self.best_of


def _as_tuple(value: object) -> object:
    """Lists become tuples. A bare string is one string: taken for its characters, the text would end at any of them."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value
