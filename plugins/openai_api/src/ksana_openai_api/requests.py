"""The bodies of the OpenAI API, as pydantic models.

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


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Body):
    """What chat and text completions share. Sampling values are checked by ``SamplingParams``."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Strings = None
    stop_strings: Strings = None
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    additional_params: dict[str, Any] | None = None


class Message(_Body):
    """One message. Further fields (``name``, ``tool_call_id``, ...) reach the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``. ``input_tokens`` replaces rendered messages by token ids."""

    messages: Annotated[list[Message] | None, FailFast()] = Field(None, min_length=1)
    input_tokens: TokenIds = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``prompt`` has too many shapes for a union to tell what is wrong with it."""

    prompt: Any = None
    add_special_tokens: bool | None = None
