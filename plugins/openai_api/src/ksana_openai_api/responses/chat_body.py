"""A request for a response, in terms of chat completions: they are prepared, and answered, by the same code."""

from __future__ import annotations

from typing import Any

from ksana.errors import RequestError
from ksana_openai_api.requests import (
    ChatCompletionRequest,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedSchema,
    NamedToolChoice,
    ResponseFormat,
    SamplingFields,
    Tool,
)
from ksana_openai_api.responses.requests import AllowedTools, FunctionChoice, FunctionTool, ResponseRequest, TextFormat


def chat_body(body: ResponseRequest, messages: list[Message]) -> ChatCompletionRequest:
    """The chat completion that ``body`` comes to.

    Raises:
        RequestError: the conversation is empty, a schema is missing, or tools are allowed that there are not.
    """
    if not messages:
        raise RequestError("input holds nothing that a model could answer", param="input")
    text_format = body.text.format if body.text else None
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool) for tool in _allowed(body)] or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(text_format) if text_format else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
    )


def param_names(body: ResponseRequest) -> dict[str, str]:
    """This API's names for what chat completions and the engine call otherwise."""
    return {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "response_format": "text.format",
        # Calls that must be made are enforced by a grammar too.
        "grammar": "text.format" if body.text and body.text.format else "tools",
    }


def _allowed(body: ResponseRequest) -> list[FunctionTool]:
    tools = body.tools or []
    if not isinstance(body.tool_choice, AllowedTools):
        return tools
    names = [choice.name for choice in body.tool_choice.tools]
    known = {tool.name for tool in tools}
    for index, name in enumerate(names):
        if name not in known:
            param = f"tool_choice.tools[{index}].name"
            raise RequestError(f"{param}: {name!r} is not among the tools", param=param)
    return [tool for tool in tools if tool.name in names]


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _tool_choice(body: ResponseRequest) -> Any:
    match body.tool_choice:
        case FunctionChoice(name=name):
            return NamedToolChoice(type="function", function=NamedFunction(name=name))
        case AllowedTools(mode=mode):
            return mode
        case choice:
            return choice


def _response_format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema_ is None:
        raise RequestError("text.format.schema is required for this type", param="text.format.schema")
    schema = NamedSchema(name=wanted.name or "", description=wanted.description, schema=wanted.schema_)
    return ResponseFormat(type="json_schema", json_schema=schema)
