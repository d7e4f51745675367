"""The body of a request for a response, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from ksana.errors import RequestError
from ksana.server.unsupported import NeutralValues, refuse_unsupported
from ksana_openai_api.requests import Body, FunctionDefinition, SamplingFields

LOGPROBS = "message.output_text.logprobs"
"""The one thing that ``include`` may ask for."""


class TextPart(Body):
    """Text of a message, or of what a tool has answered."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _as_parts(value: object) -> object:
    return _as_list(value, {"type": "text", "text": value}, "parts")


def _as_items(value: object) -> object:
    return _as_list(value, {"type": "message", "role": "user", "content": value}, "items")


def _as_list(value: object, of_string: dict[str, object], elements: str) -> object:
    if isinstance(value, str):
        return [of_string]
    if not isinstance(value, list):
        raise PydanticCustomError("string_or_list", "must be a string or a list of {elements}", {"elements": elements})
    return value


Content = Annotated[list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]
"""A string is one part."""


class MessageItem(Body):
    """A message of anybody."""

    type: Literal["message"] | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Body):
    """A call that the model has made. One that broke off has the status ``incomplete``."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: str | None = None


class FunctionCallOutputItem(Body):
    """What a call has given."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: Content


class ReasoningPart(Body):
    """Text of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought before it answered; goes to the chat template, and most of them leave it out."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Annotated[list[ReasoningPart] | None, FailFast()] = None


def _item_type(item: object) -> object:
    if isinstance(item, Body):
        return getattr(item, "type", None) or "message"
    return item.get("type") or "message" if isinstance(item, dict) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="must be an item of type message, function_call, function_call_output or reasoning",
    ),
]


class _FunctionType(Body):
    type: Literal["function"]


class FunctionTool(FunctionDefinition, _FunctionType):
    """An entry of ``tools``: this API has no object around the function.

    Its first field is the type, so that a tool of another type is refused for that and not for what it lacks.
    """


class FunctionChoice(Body):
    """``tool_choice`` that names the function to call."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """``tool_choice`` that leaves some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], FailFast()] = Field(min_length=1)


class TextFormat(Body):
    """``text.format``. A schema that is not strict is enforced all the same."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """``text``."""

    format: TextFormat | None = None


class Reasoning(Body):
    """``reasoning``. The effort is a variable of the chat template, ``reasoning_effort``."""

    effort: str | None = None


class ResponseStreamOptions(Body):
    """``stream_options``, of which nothing is supported."""


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class ResponseRequest(SamplingFields):
    """``POST /v1/responses``."""

    model: str | None = None
    input: Annotated[
        list[InputItem],
        FailFast(),
        Field(min_length=1),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, description="calls of tools that run on the server; there are none")
    tools: Annotated[list[FunctionTool] | None, FailFast()] = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str] | None, FailFast()] = None
    top_logprobs: int | None = None
    metadata: Annotated[dict[_Key, _Value] | None, Field(max_length=16)] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Log probabilities belong into the answer."""
        return LOGPROBS in (self.include or ())


_NEUTRAL: NeutralValues = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    # Fields of chat completions, which mean something else here or have another name.
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "reasoning_effort": (),
    "logprobs": (False,),
    "n": (1,),
}
_NEUTRAL_TEXT: NeutralValues = {"verbosity": ("medium",)}
_NEUTRAL_REASONING: NeutralValues = {
    "summary": ("auto",),
    "generate_summary": ("auto",),
    "context": ("auto",),
    "mode": ("standard",),
}
_NEUTRAL_STREAM_OPTIONS: NeutralValues = {"include_obfuscation": (False,)}


def check_supported(body: ResponseRequest) -> None:
    """Refuse what is known from OpenAI and has no meaning here.

    Raises:
        RequestError: ``param`` names it.
    """
    for part, neutral, prefix in (
        (body, _NEUTRAL, ""),
        (body.text, _NEUTRAL_TEXT, "text."),
        (body.reasoning, _NEUTRAL_REASONING, "reasoning."),
        (body.stream_options, _NEUTRAL_STREAM_OPTIONS, "stream_options."),
    ):
        if part is not None:
            refuse_unsupported(part.model_extra or {}, neutral, prefix=prefix)
    for index, name in enumerate(body.include or ()):
        if name != LOGPROBS:
            raise RequestError(
                f"include: {name!r} is not supported by this server, only {LOGPROBS!r}",
                code="unsupported_parameter",
                param=f"include[{index}]",
            )
    if body.top_logprobs and not body.wants_logprobs:
        raise RequestError(f"top_logprobs needs include to hold {LOGPROBS!r}", param="top_logprobs")
