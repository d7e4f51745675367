"""From a body to sampling parameters."""

from __future__ import annotations

from ksana.errors import RequestError
from ksana.types.model import ModelConfig
from ksana.types.sampling import SamplingParams
from ksana_openai_api.requests import GenerationRequest


def make_sampling_params(body: GenerationRequest, model: ModelConfig, max_tokens: int | None) -> SamplingParams:
    """Translate ``body``; what it leaves out comes from the model's generation config, then from OpenAI's defaults.

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """
    defaults = model.generation_defaults
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
        top_k=body.top_k if body.top_k is not None else int(defaults.get("top_k", 0)),
        top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
        min_p=_first(body.min_p, defaults.get("min_p"), 0.0),
        seed=body.seed,
        stop=(*(body.stop or ()), *(body.stop_strings or ())),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def check_stream_options(body: GenerationRequest) -> None:
    """``stream_options`` without ``stream`` is a mistake that OpenAI refuses too."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
