"""Whatever a model writes and however it is cut: the same answer, and no exception."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ksana.testing.output_parser import check_output_parser, parse_pieces
from ksana.text.parsing import OutputParser, ParserChain, ParserContext, ReasoningParserInfo
from ksana_openai_api.reasoning_parsers import REASONING_PARSERS
from ksana_openai_api.tool_parsers import TOOL_PARSERS

FRAGMENTS = {
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json", "```"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ],
    "deepseek_v32": [
        *(
            "<｜DSML｜function_calls>",
            '<｜DSML｜invoke name="f">',
            '<｜DSML｜invoke name="',
            '<｜DSML｜parameter name="a"',
        ),
        *(
            ' string="true">',
            ' string="false">',
            ">",
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "</｜DSML｜function_calls>",
        ),
    ],
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '"name": "f"', '"arguments": ', "<tool"],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>", '{"name": "f", "parameters": ', '"name": "f"'],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call"),
    ],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": ', '"name": "f"', '"parameters": ', "; "],
    "llama4_pythonic": [
        "<|python_start|>",
        "<|python_end|>",
        "[f(",
        "a=",
        "b=",
        ")",
        "'''",
        "'",
        "\\",
        "True",
        "-1.5",
        "1e999",
    ],
    "mistral": ["[TOOL_CALLS]", '[{"name": "f", "arguments": ', "f", "[ARGS]", "[CALL_ID]", "abcdefgh1", '"name": "f"'],
}
FRAGMENTS["deepseek_v31"] = FRAGMENTS["deepseek_v3"]
FRAGMENTS["llama4_json"] = FRAGMENTS["llama3_json"]
FRAGMENTS["pythonic"] = FRAGMENTS["llama4_pythonic"]
COMMON = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "{}",
    '{"a": "x"}',
    ": ",
    ", ",
    "1",
    "null",
    " ",
    "\n",
    "text",
    "é",
    "<think>",
    "</think>",
]

INFOS = {info.name: info for info in TOOL_PARSERS}


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts that are made of the format's own pieces, in an order that is rarely right."""
    return st.lists(st.sampled_from([*FRAGMENTS[name], *COMMON]), max_size=14).map("".join)


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
def test_tool_parsers_do_not_depend_on_how_the_text_is_cut(name: str) -> None:
    @given(texts(name))
    def check(text: str) -> None:
        check_output_parser(lambda: INFOS[name].create(ParserContext()), [text])

    check()


@pytest.mark.parametrize("info", REASONING_PARSERS, ids=lambda info: info.name)
@pytest.mark.parametrize("prompt", [None, "<think>", ""])
def test_a_chain_does_not_depend_on_how_the_text_is_cut(info: ReasoningParserInfo, prompt: str | None) -> None:
    context = ParserContext(chat_template_kwargs={"thinking": True}, prompt=prompt)

    def create() -> OutputParser:
        return ParserChain(info.create(context), INFOS["hermes"].create(context))

    @given(texts("hermes"))
    def check(text: str) -> None:
        check_output_parser(create, [text])

    check()


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
def test_text_of_any_characters_is_not_lost(name: str) -> None:
    @given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=6))
    def check(text: str, cuts: list[int]) -> None:
        places = [0, *sorted(cuts), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(places)]
        parser = INFOS[name].create(ParserContext())
        assert parse_pieces(parser, pieces).content == "".join(pieces)

    check()
