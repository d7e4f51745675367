"""What reasoning becomes, alone and with tool calls after it."""

from __future__ import annotations

import pytest

from ksana.testing.output_parser import check_output_parser, parse_pieces
from ksana.text.parsing import ParsedAnswer, ParserChain, ParserContext, ReasoningEvent
from ksana_openai_api.reasoning_parsers import REASONING_PARSERS
from ksana_openai_api.tool_parsers import TOOL_PARSERS

REASONING = {info.name: info for info in REASONING_PARSERS}
TOOLS = {info.name: info for info in TOOL_PARSERS}

THINKING = ParserContext(chat_template_kwargs={"thinking": True, "enable_thinking": True})
ALL = pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3", "qwen3"])


def chain(name: str, context: ParserContext, tools: str = "") -> ParserChain:
    tool_parser = TOOLS[tools].create(context) if tools else None
    return ParserChain(REASONING[name].create(context), tool_parser)


def parse(name: str, text: str, context: ParserContext = THINKING, tools: str = "") -> ParsedAnswer:
    check_output_parser(lambda: chain(name, context, tools), [text])
    return parse_pieces(chain(name, context, tools), [text])


@ALL
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nFirst, \n then.\n</think>\n\nThe answer.\n", "First, \n then.", "The answer.\n"),
        ("First, then.</think>The answer.", "First, then.", "The answer."),
        ("\nNever finished <thi", "Never finished <thi", ""),
        ("<think>\n\n</think>\n\nHello", "", "Hello"),
        ("a </thin b</think>c <think>d</think>e", "a </thin b", "c <think>d</think>e"),
        ("", "", ""),
    ],
)
def test_reasoning_ends_with_its_tag(name: str, text: str, reasoning: str, content: str) -> None:
    assert parse(name, text) == ParsedAnswer(content, reasoning, ())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("deepseek_v3", {}), ("deepseek_v3", {"thinking": False}), ("qwen3", {"enable_thinking": False})],
)
def test_a_request_that_does_not_reason_has_no_parser(name: str, kwargs: dict[str, object]) -> None:
    context = ParserContext(chat_template_kwargs=kwargs)
    assert REASONING[name].create(context) is None
    assert parse(name, " <think>a</think>b\n", context) == ParsedAnswer(" <think>a</think>b\n", "", ())


def test_qwen3_reasons_by_default() -> None:
    assert parse("qwen3", "a</think>b", ParserContext()) == ParsedAnswer("b", "a", ())


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", "a</think>b", "a", "b"),
        ("<|im_start|>assistant\n", "\n<think>a</think>b", "a", "b"),
        ("<|im_start|>assistant\n", "\nJust an <think>answer\n", "", "\nJust an <think>answer\n"),
    ],
)
def test_qwen3_reads_from_the_prompt_whether_the_template_has_begun_to_reason(
    prompt: str, text: str, reasoning: str, content: str
) -> None:
    assert parse("qwen3", text, ParserContext(prompt=prompt)) == ParsedAnswer(content, reasoning, ())


def test_calls_are_read_after_the_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = parse("qwen3", f"<think>\nI could {call}\n</think>\n\n{call}\n", tools="hermes")
    assert (answer.reasoning, answer.content) == (f"I could {call}", "")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]


def test_a_call_that_the_end_of_the_answer_cuts_off_is_given_out_by_the_chain() -> None:
    answer = parse("qwen3", "a</think>b <tool_c", tools="hermes")
    assert answer == ParsedAnswer("b <tool_c", "a", ())


def test_a_chain_without_parsers_passes_text_on() -> None:
    assert parse_pieces(ParserChain(None, None), ["a ", "\n"]) == ParsedAnswer("a \n", "", ())


def test_reasoning_streams() -> None:
    parser = chain("deepseek_r1", THINKING)
    events = [event for character in "Thinking" for event in parser.push(character)]
    assert events == [ReasoningEvent(character) for character in "Thinking"]
