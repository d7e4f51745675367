"""Choosing parsers by flags, and what is said about names that nobody has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.cli.serve import main
from ksana.config.compose import compose_config
from ksana.config.options import collect_options
from ksana.config.settings import Setting
from ksana.errors import UsageError
from ksana.plugin.manager import KsanaPluginManager
from ksana.text.parsing import ParserContext, ReasoningEvent, TextEvent
from ksana.types.config import KsanaConfig
from ksana_openai_api import plugin
from ksana_openai_api.output_parsers import ChatParsers

PARSER_FILE = """
from ksana import hookimpl
from ksana.text.parsing import ParserChain, ToolParserInfo

@hookimpl
def ksana_tool_parsers(register):
    register(ToolParserInfo("mine", lambda context: ParserChain(None, None)))
"""


@pytest.fixture
def manager() -> KsanaPluginManager:
    manager = KsanaPluginManager()
    manager.register(plugin, "openai_api")
    return manager


def configured(manager: KsanaPluginManager, **options: object) -> ChatParsers:
    settings = {("plugin_options", "openai_api", name): Setting(value, name) for name, value in options.items()}
    config = compose_config(None, {}, settings, collect_options(manager)).config
    manager.configure(config)
    return ChatParsers.choose(config, manager)


def test_nothing_is_parsed_unless_it_is_asked_for(manager: KsanaPluginManager) -> None:
    assert configured(manager) == ChatParsers.choose(KsanaConfig(), manager) == ChatParsers()
    assert ChatParsers().create(ParserContext(), with_tools=True) is None


def test_the_chosen_parsers_are_made_for_each_request(manager: KsanaPluginManager) -> None:
    parsers = configured(manager, tool_call_parser="hermes", reasoning_parser="qwen3", enable_auto_tool_choice=True)
    assert parsers.auto_tool_choice
    assert parsers.reasoning is not None
    assert parsers.reasoning.end_token_text == "</think>"
    thinking = parsers.create(ParserContext(), with_tools=False)
    assert thinking is not None
    assert thinking.push("a</think><tool_call>") == [ReasoningEvent("a"), TextEvent("<tool_call>")]
    silent = ParserContext(chat_template_kwargs={"enable_thinking": False})
    assert parsers.create(silent, with_tools=False) is None
    calling = parsers.create(silent, with_tools=True)
    assert calling is not None
    assert calling.push("a<tool_call>") == [TextEvent("a")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_call_parser": "hermmes"}, r"--tool-call-parser: there is no parser 'hermmes'; did you mean hermes\?"),
        ({"tool_call_parser": "x"}, r"\(known: deepseek_v3, deepseek_v31, deepseek_v32, hermes, internlm, kimi_k2, "),
        ({"reasoning_parser": "x"}, r"--reasoning-parser: .* \(known: deepseek_r1, deepseek_v3, qwen3\)"),
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice needs --tool-call-parser"),
        ({"tool_parser_plugin": "/no/such.py"}, "there is no parser file /no/such.py"),
    ],
)
def test_a_choice_that_cannot_be_had_stops_the_start(
    manager: KsanaPluginManager, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        configured(manager, **options)


def test_a_file_of_parsers_can_be_chosen_from(manager: KsanaPluginManager, tmp_path: Path) -> None:
    file = tmp_path / "parsers.py"
    file.write_text(PARSER_FILE)
    parsers = configured(manager, tool_parser_plugin=str(file), tool_call_parser="mine")
    assert parsers.tool is not None
    assert parsers.tool.name == "mine"


def test_the_flags_are_those_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser=qwen3", "--enable-auto-tool-choice"]
    assert main([*flags, "--tool-parser-plugin", "my.py", "--print-config"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "tool_call_parser: hermes",
        "reasoning_parser: qwen3",
        "enable_auto_tool_choice: true",
        "plugin: my.py",
    ):
        assert line in shown
