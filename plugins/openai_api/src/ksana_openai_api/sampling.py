"""From a body to sampling parameters."""

from __future__ import annotations

from ksana.errors import RequestError
from ksana.server.logit_bias import parse_logit_bias
from ksana.types.model import ModelConfig
from ksana.types.sampling import SamplingParams
from ksana_openai_api.requests import GenerationRequest
from ksana_openai_api.structure import grammar_of


def make_sampling_params(
    body: GenerationRequest, model: ModelConfig, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Translate ``body``; what it leaves out comes from the model's generation config, then from OpenAI's defaults.

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """
    defaults = model.generation_defaults
    n = 1 if body.n is None else body.n
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        # Nothing is drawn in a beam search, nor in one of a single beam.
        temperature=0.0 if body.use_beam_search else _first(body.temperature, defaults.get("temperature"), 1.0),
        top_k=body.top_k if body.top_k is not None else int(defaults.get("top_k", 0)),
        top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
        min_p=_first(body.min_p, defaults.get("min_p"), 0.0),
        seed=body.seed,
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        no_repeat_ngram_size=body.no_repeat_ngram_size or 0,
        logit_bias=parse_logit_bias(body.logit_bias),
        bad_words=tuple(body.bad_words or ()),
        n=n,
        num_beams=n if body.use_beam_search else 1,
        length_penalty=_first(body.length_penalty, 1.0),
        early_stopping=False if body.early_stopping is None else body.early_stopping,
        stop=(*(body.stop or ()), *(body.stop_strings or ())),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar_of(body),
    )


def check_stream_options(body: GenerationRequest) -> None:
    """``stream_options`` without ``stream`` is a mistake that OpenAI refuses too."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
