"""One turn of a conversation: from a chat body to what the engine gets, and to the parsers of what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ksana.errors import RequestError
from ksana.text.parsing import OutputParser, ParserChain, ParserContext
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams
from ksana_openai_api.messages import template_messages
from ksana_openai_api.output_parsers import ChatParsers
from ksana_openai_api.requests import ChatCompletionRequest
from ksana_openai_api.sampling import make_sampling_params
from ksana_openai_api.tool_choice import ToolChoice, choose_tools

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

_TAIL_TOKENS = 16
"""Tokens at a prompt's end that are shown to parsers: a template may have begun the answer there."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A prepared turn.

    Attributes:
        draft: for the engine.
        tools: which calls are possible.
        context: what parsers get to know.
        parsers: that the operator has chosen.
    """

    draft: RequestDraft
    tools: ToolChoice
    context: ParserContext
    parsers: ChatParsers

    def create_parser(self, engine: AsyncEngine, prompt_token_ids: list[int]) -> OutputParser | None:
        """The parser of one answer; None if all its text is content.

        Args:
            prompt_token_ids: the prompt, as the engine runs it.
        """
        tail = engine.tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        context = replace(self.context, prompt=tail)
        if self.tools.grammar is None:
            return self.parsers.create(context, with_tools=self.tools.auto)
        reasoning = self.parsers.reasoning.create(context) if self.parsers.reasoning else None
        return ParserChain(reasoning, self.tools.forced_parser())


def prepare_turn(engine: AsyncEngine, parsers: ChatParsers, body: ChatCompletionRequest) -> ChatTurn:
    """Check ``body`` and translate it.

    Raises:
        RequestError: a field is wrong; ``param`` names it.
    """
    if body.messages is None and body.input_tokens is None:
        raise RequestError("messages is required", param="messages")
    tools = choose_tools(body, auto_possible=parsers.auto_tool_choice)
    kwargs = _template_kwargs(body, tools)
    context = ParserContext(tools.tools, kwargs, tokenizer=engine.tokenizer)
    draft = RequestDraft(
        prompt_token_ids=body.input_tokens,
        messages=None if body.input_tokens is not None else template_messages(body.messages or ()),
        sampling=_sampling(engine, parsers, body, tools, context),
        additional_params=body.additional_params or {},
        chat_template_kwargs=kwargs,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    return ChatTurn(draft, tools, context, parsers)


def _template_kwargs(body: ChatCompletionRequest, tools: ToolChoice) -> dict[str, object]:
    kwargs: dict[str, object] = dict(body.chat_template_kwargs or {})
    given = {
        "tools": list(tools.tools) or None,
        "documents": body.documents or None,
        "reasoning_effort": body.reasoning_effort,
        "add_generation_prompt": body.add_generation_prompt,
    }
    return kwargs | {name: value for name, value in given.items() if value is not None}


def _sampling(
    engine: AsyncEngine,
    parsers: ChatParsers,
    body: ChatCompletionRequest,
    tools: ToolChoice,
    context: ParserContext,
) -> SamplingParams:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise RequestError("max_tokens must be an integer of at least 1", param="max_tokens")
    sampling = make_sampling_params(body, engine.model_config, max_tokens, _num_logprobs(body))
    if sampling.grammar is not None and (tools.auto or tools.grammar):
        raise RequestError(
            "an answer of a given structure cannot be a tool call too; set tool_choice to none",
            param="response_format",
        )
    sampling = replace(sampling, grammar=sampling.grammar or tools.grammar)
    reasoning = parsers.reasoning
    reasons = reasoning is not None and reasoning.create(context) is not None
    if sampling.grammar is not None and reasoning is not None and reasons:
        end = engine.tokenizer.encode(reasoning.end_token_text, add_special_tokens=False)
        sampling = replace(sampling, grammar_after=tuple(end))
    tool_parser = parsers.tool if tools.auto else None
    if any(info is not None and info.needs_special_tokens for info in (tool_parser, reasoning if reasons else None)):
        sampling = replace(sampling, skip_special_tokens=False)
    return sampling


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
