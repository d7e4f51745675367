"""The body of ``POST /generate``: the wire format of the original engine, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from ksana.server.unsupported import NeutralValues

# A list of a million wrong elements is one error and not a million, hence FailFast on every list.
TokenIds = Annotated[list[int] | None, FailFast()]
Strings = Annotated[list[str] | None, FailFast()]
Messages = Annotated[list[dict[str, Any]] | None, FailFast()]
Embeddings = Annotated[list[list[Any]] | None, FailFast()]
"""Numbers, whose conversion to an array checks them faster than a model would."""


class SamplingConfig(BaseModel):
    """``sampling_config``. Unknown keys are refused: a misspelt option would otherwise silently be the default."""

    model_config = ConfigDict(strict=True, extra="allow")

    topk: int | None = None
    topp: float | None = None
    temperature: float | None = None
    min_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: TokenIds = None
    stop_strings: Strings = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    enable_thinking: bool | None = None


class InputRefitEmbedding(BaseModel):
    """Rows that replace prompt embeddings: entry i, flat or as a list of rows, starts at token ``pos[i]``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    pos: TokenIds = None
    embeddings: Embeddings = None


class GenerateRequest(BaseModel):
    """The whole body. Unknown fields are tolerated here, as the original does: clients send fields of their own."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    prompt: str | None = None
    input_tokens: TokenIds = None
    messages: Messages = None
    use_chat_template: bool | None = None
    model_name: str | None = None
    sampling_config: SamplingConfig = Field(default_factory=SamplingConfig)
    input_refit_embedding: InputRefitEmbedding | None = None
    pos: TokenIds = None
    embeddings: Embeddings = None
    additional_params: dict[str, Any] | None = None
    stream: bool | None = None


UNSUPPORTED: NeutralValues = {
    "model_type": ("", "empty"),
    "structured_output_regex": ("",),
    "request_target": ({}, []),
}
"""Fields of the original that this version has no meaning for."""

UNSUPPORTED_SAMPLING: NeutralValues = {
    "input_top_logprobs_num": (0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "decoder_no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "enable_structured_output": (False,),
    "json_schema": ("",),
}
"""The same within ``sampling_config``."""
