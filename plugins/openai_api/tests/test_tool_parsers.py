"""What each format of tool calls becomes, for answers as models write them and for damaged ones."""

from __future__ import annotations

import json
import re

import pytest

from ksana.testing.output_parser import check_output_parser, parse_pieces
from ksana.text.parsing import OutputParser, ParsedAnswer, ParserContext, ToolCallArguments, ToolCallStart
from ksana_openai_api.tool_parsers import TOOL_PARSERS

PARSERS = {info.name: info for info in TOOL_PARSERS}

NESTED = '{"note": "a \\"quoted\\" \\\\ { [ 東京 \\u00e9", "at": {"x": [1.50, -2e3, {}], "on": true}, "none": null}'
"""Arguments with everything that a parser could trip over or be tempted to write differently."""

V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DSML_BEGIN, DSML_END = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"


def deepseek_v3(*calls: tuple[str, str]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return V3_BEGIN + written + V3_END


def deepseek_v31(*calls: tuple[str, str]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return V3_BEGIN + written + V3_END


def deepseek_v32(*calls: tuple[str, str]) -> str:
    written = "".join(
        f'<｜DSML｜invoke name="{name}">\n{dsml(arguments)}</｜DSML｜invoke>\n' for name, arguments in calls
    )
    return DSML_BEGIN + written + DSML_END


def dsml(arguments: str) -> str:
    return "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in (json.loads(arguments) if arguments else {}).items()
    )


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments or "{}"}}}\n</tool_call>'
        for name, arguments in calls
    )


def internlm(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": {arguments or "{}"}}}<|action_end|>'
        for name, arguments in calls
    )


def kimi_k2(*calls: tuple[str, str]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return KIMI_BEGIN + written + KIMI_END


def llama_json(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments or "{}"}}}' for name, arguments in calls)


def mistral(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{arguments or '{}'}" for name, arguments in calls)


def pythonic(*calls: tuple[str, str]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments or '{}').items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def llama4_pythonic(*calls: tuple[str, str]) -> str:
    return f"<|python_start|>{pythonic(*calls)}<|python_end|>"


WRITERS = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": deepseek_v32,
    "hermes": hermes,
    "internlm": internlm,
    "kimi_k2": kimi_k2,
    "llama3_json": llama_json,
    "llama4_json": llama_json,
    "llama4_pythonic": llama4_pythonic,
    "mistral": mistral,
    "pythonic": pythonic,
}
NOT_VERBATIM = {"deepseek_v32", "llama4_pythonic", "pythonic"}
"""Formats whose arguments are not JSON to begin with."""

BEGIN_THE_ANSWER = {"llama3_json", "llama4_json", "pythonic"}
"""Formats without a tag, in which no text stands before a call."""

ALL = pytest.mark.parametrize("name", sorted(WRITERS))


def create(name: str) -> OutputParser:
    return PARSERS[name].create(ParserContext())


def parse(name: str, text: str) -> ParsedAnswer:
    check_output_parser(lambda: create(name), [text])
    return parse_pieces(create(name), [text])


def calls(answer: ParsedAnswer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]


def test_the_formats_are_those_that_are_documented() -> None:
    assert set(PARSERS) == set(WRITERS)


@ALL
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Just text.\n\n  With a list: [1, 2], {curly}, <tags> and a trailing line.\n",
        "{",
        '{"answer": 42}',
        "[1] is a reference, f(x) a function",
        "\n  I see",
    ],
)
def test_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert parse(name, text) == ParsedAnswer(text, "", ())


@ALL
def test_one_call(name: str) -> None:
    answer = parse(name, WRITERS[name](("get_weather", '{"city": "Paris"}')))
    assert answer.content == ""
    assert calls(answer) == [("get_weather", '{"city": "Paris"}')]


@ALL
def test_parallel_calls_keep_their_order(name: str) -> None:
    answer = parse(name, WRITERS[name](("first", '{"a": 1}'), ("second", '{"b": 2}'), ("first", '{"a": 3}')))
    assert answer.content == ""
    assert calls(answer) == [("first", '{"a": 1}'), ("second", '{"b": 2}'), ("first", '{"a": 3}')]


@ALL
def test_a_call_without_parameters_has_an_empty_object(name: str) -> None:
    # vllm#28806, vllm#11392: such calls lost their arguments, or were dropped.
    assert calls(parse(name, WRITERS[name](("now", ""), ("now", "{}")))) == [("now", "{}"), ("now", "{}")]


@ALL
def test_nested_arguments_with_escapes_and_any_script(name: str) -> None:
    [(_, arguments)] = calls(parse(name, WRITERS[name](("f", NESTED))))
    assert json.loads(arguments) == json.loads(NESTED)
    if name not in NOT_VERBATIM:
        assert arguments == NESTED, "arguments that are JSON reach the client as the model wrote them (vllm#10395)"


@ALL
def test_a_call_that_looks_like_markup_inside(name: str) -> None:
    text = '</tool_call> <｜tool▁call▁end｜> <|tool_call_end|> [TOOL_CALLS] ``` it\'s "so" <think>'
    arguments = json.dumps({"text": text}, ensure_ascii=False)
    assert calls(parse(name, WRITERS[name](("f", arguments), ("g", "{}")))) == [("f", arguments), ("g", "{}")]


@ALL
def test_text_around_calls_is_content_and_line_breaks_beside_markup_are_not(name: str) -> None:
    before = "" if name in BEGIN_THE_ANSWER else "Let me see.\n\n"
    call = WRITERS[name](("f", '{"a": 1}'))
    answer = parse(name, f"{before}{call}\n\nDone, I think.\n")
    assert answer.content == f"{before.strip()}Done, I think.\n"
    assert calls(answer) == [("f", '{"a": 1}')]


@ALL
@pytest.mark.parametrize("function", ["no-such.tool", "mcp__files__read"])
def test_names_of_unknown_tools_are_passed_on(name: str, function: str) -> None:
    assert calls(parse(name, WRITERS[name]((function, "{}")))) == [(function, "{}")]


@ALL
def test_an_answer_that_is_cut_off_anywhere_loses_no_arguments(name: str) -> None:
    """What has been written of a call is given out as its arguments, or as content while it is no call yet."""
    text = WRITERS[name](("f", '{"city": "Paris", "days": 3}'))
    whole = '{"city": "Paris", "days": 3}'
    for end in range(len(text)):
        answer = parse_pieces(create(name), [text[:end]])
        if answer.calls:
            [(function, arguments)] = calls(answer)
            # What may be the beginning of a tag is part of the value, if nothing comes after it.
            assert (function, whole.startswith(arguments.partition("<")[0])) == ("f", True), text[:end]
            assert "Paris" not in answer.content
        else:
            assert answer.content == text[:end]


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"pythonic", "llama4_pythonic"}))
def test_arguments_stream_while_they_are_written(name: str) -> None:
    text = WRITERS[name](("f", json.dumps({"text": "word " * 20})))
    parser = create(name)
    events = [event for character in text for event in parser.push(character)]
    assert sum(isinstance(event, ToolCallStart) for event in events) == 1
    assert sum(isinstance(event, ToolCallArguments) for event in events) > 90


@ALL
def test_text_streams_but_for_what_may_become_a_tag(name: str) -> None:
    parser = create(name)
    text = "Words without any markup."
    events = [parser.push(character) for character in text]
    assert [event.text.strip() for found in events for event in found] == list(text.replace(" ", ""))


@ALL
def test_each_request_has_a_parser_of_its_own(name: str) -> None:
    text = WRITERS[name](("f", '{"a": 1}'))
    first, second = create(name), create(name)
    first.push(text[: len(text) // 2])
    assert calls(parse_pieces(second, [text])) == [("f", '{"a": 1}')]
    assert calls(parse_pieces(create(name), [text])) == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"),
    [
        # The keys of a call in another order, more keys, or the arguments in another form.
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"type": "function", "name": "f", "x": [1]}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f\\u00e9", "arguments": {}}</tool_call>', "", [("fé", "{}")]),
        # Damaged calls: too many braces, too few, none, no name, Python instead of JSON.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>!', "}!", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>!', "!", [("f", '{"a": 1')]),
        ("hermes", "<tool_call>f</tool_call>", "<tool_call>f</tool_call>", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
        ("hermes", "<tool_call>{'name': 'f'}", "<tool_call>{'name': 'f'}", []),
        ("hermes", '<tool_call><tool_call>{"name": "f"}', "<tool_call>", [("f", "{}")]),
        ("internlm", "<|action_start|><|interpreter|>\n1", "<|action_start|><|interpreter|>\n1", []),
        # Llama: a prefix, other separators, and JSON that is an answer and no call.
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            "llama3_json",
            '{"name": "f", "arguments": {}}\n{"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("llama3_json", '{"name": "Ann", "parameters": 3, "age": 4}', '{"name": "Ann", "parameters": 3, "age": 4}', []),
        ("llama3_json", '{"name": "Ann"} is a person', '{"name": "Ann"} is a person', []),
        # Mistral: all three forms.
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefgh1[ARGS]{}',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ("mistral", "[TOOL_CALLS] and more", "[TOOL_CALLS] and more", []),
        # Tags that models leave out or misspell.
        (
            "kimi_k2",
            "<|tool_call_section_begin|><|tool_call_begin|>f:12<|tool_call_argument_begin|>{}",
            "",
            [("f", "{}")],
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a.b<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "",
            [("a.b", "{}")],
        ),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
        ("deepseek_v3", f"{V3_BEGIN} nothing {V3_END}", f"{V3_BEGIN} nothing {V3_END}", []),
        ("llama4_pythonic", "[f(a=1)]", "", [("f", '{"a": 1}')]),
        # DeepSeek V3.2: values that are not what they say, and a call with JSON inside.
        (
            "deepseek_v32",
            f'{DSML_BEGIN}<｜DSML｜invoke name="f">{{"a": 1}}</｜DSML｜invoke>{DSML_END}',
            "",
            [("f", '{"a": 1}')],
        ),
        (
            "deepseek_v32",
            DSML_BEGIN
            + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">no json</｜DSML｜parameter>'
            '<｜DSML｜parameter name="b">[1]</｜DSML｜parameter></｜DSML｜invoke>',
            "",
            [("f", '{"a": "no json", "b": [1]}')],
        ),
        # Python: what is no literal is text; what is no call is content.
        (
            "pythonic",
            "[f(a=celsius, b=-1.5, c=(1,), d=true, e='''x\ny''')]",
            "",
            [("f", '{"a": "celsius", "b": -1.5, "c": [1], "d": true, "e": "x\\ny"}')],
        ),
        (
            "pythonic",
            "[f(a='two\nlines', b='\\d', c=1e999)]",
            "",
            [("f", '{"a": "two\\nlines", "b": "\\\\d", "c": "1e999"}')],
        ),
        ("pythonic", "[f(a=open('x').read())]", "", [("f", '{"a": "open(\'x\').read()"}')]),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("pythonic", "[f(a=1), g(2)] and", ", g(2)] and", [("f", '{"a": 1}')]),
        ("pythonic", "[]", "[]", []),
        ("pythonic", f"[f(a={'[' * 5000}", f"[f(a={'[' * 5000}", []),
    ],
)
def test_variants_and_damage(name: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = parse_pieces(create(name), [text]) if len(text) > 1000 else parse(name, text)
    assert (answer.content, calls(answer)) == (content, expected)


def test_ids_are_the_models_own_or_in_the_form_that_its_template_accepts() -> None:
    [kimi] = parse_pieces(create("kimi_k2"), [kimi_k2(("f", "{}"))]).calls
    assert kimi.id == "functions.f:0"
    [given, drawn] = parse_pieces(create("mistral"), ["[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}[TOOL_CALLS]g{}"]).calls
    assert given.id == "abcdefgh1"
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", drawn.id)
    [openai] = parse_pieces(create("hermes"), [hermes(("f", "{}"))]).calls
    assert re.fullmatch(r"call_[0-9a-f]{24}", openai.id)


def test_an_id_that_the_model_repeats_is_replaced() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = parse_pieces(create("kimi_k2"), [call + call]).calls
    assert (first.id, second.name) == ("functions.f:0", "f")
    assert second.id != first.id


def test_a_name_or_value_that_utf8_cannot_encode_is_made_encodable() -> None:
    hermes_call = parse_pieces(
        create("hermes"), [r'<tool_call>{"name": "f\ud800", "arguments": "{\"a\": \"\udfff\"}"}']
    )
    pythonic_call = parse_pieces(create("pythonic"), [r"[f(a='\ud800é')]"])
    for [call] in (hermes_call.calls, pythonic_call.calls):
        (call.name + call.arguments).encode()
        assert json.loads(call.arguments)["a"]


def test_large_arguments_take_time_in_proportion_to_their_length() -> None:
    """A parser that scans its text anew with every token would need minutes for this one, and trip the time limit."""
    text = hermes(("write", json.dumps({"text": 'a "quoted" word ' * 20000})))
    assert calls(parse_pieces(create("hermes"), list(text)))[0][1] in text


@pytest.mark.parametrize("name", ["internlm", "kimi_k2", "mistral", "deepseek_v32"])
def test_formats_made_of_special_tokens_ask_for_them(name: str) -> None:
    assert PARSERS[name].needs_special_tokens
