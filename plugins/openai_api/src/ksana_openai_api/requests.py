"""The bodies of chat and text completions, as pydantic models.

Null is taken for "not given" everywhere, and fields that nobody knows are tolerated: clients and gateways add their
own. Fields that are known and mean something we do not have are refused: see :mod:`ksana_openai_api.unsupported`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

# A list of a million wrong elements is one error and not a million, hence FailFast on every list.
TokenIds = Annotated[list[int] | None, FailFast()]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Strings = Annotated[list[str] | None, FailFast(), BeforeValidator(_as_list)]
"""One string or several."""


class Body(BaseModel):
    """Base of all bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Body):
    """``response_format.json_schema``. A schema that is not strict is enforced all the same."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """``structured_outputs`` of vLLM: exactly one of these."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str] | None, FailFast()] = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """How tokens are drawn, and how a request is treated. Values are checked by ``SamplingParams``."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Strings = None
    stop: Strings = None
    stop_strings: Strings = None
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    additional_params: dict[str, Any] | None = None


class GenerationRequest(SamplingFields):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, FailFast()] = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None


class Message(Body):
    """One message. Further fields (``name``, ``tool_call_id``, ...) reach the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None


class FunctionDefinition(Body):
    """What a model may call. ``parameters`` is a JSON schema of an object."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The function of a ``tool_choice``."""

    name: str


class NamedToolChoice(Body):
    """``tool_choice`` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``. ``input_tokens`` replaces rendered messages by token ids."""

    messages: Annotated[list[Message] | None, FailFast()] = Field(None, min_length=1)
    input_tokens: TokenIds = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool] | None, FailFast()] = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    documents: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``prompt`` has too many shapes for a union to tell what is wrong with it."""

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
