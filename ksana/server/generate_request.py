"""The body of ``POST /generate``: the wire format of the original engine, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from ksana.server.input_embeddings import Embeddings, InputRefitEmbedding
from ksana.server.unsupported import NeutralValues

# A list of a million wrong elements is one error and not a million, hence FailFast on every list.
TokenIds = Annotated[list[int] | None, FailFast()]
Strings = Annotated[list[str] | None, FailFast()]
Messages = Annotated[list[dict[str, Any]] | None, FailFast()]
LogitBias = Annotated[dict[str, float] | None, FailFast()]


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
    input_top_logprobs_num: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    decoder_no_repeat_ngram_size: int | None = None
    logit_bias: LogitBias = None
    bad_words: Strings = None
    num_return_sequences: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    enable_structured_output: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    enable_thinking: bool | None = None


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
    structured_output_regex: str | None = None
    stream: bool | None = None


UNSUPPORTED: NeutralValues = {
    "model_type": ("", "empty"),
    "request_target": ({}, []),
}
"""Fields of the original that this version has no meaning for."""
