"""Parsers that plugins bring: by hook, and by a file that the operator names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ksana import UsageError, hookimpl
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.output_parsers import collect_reasoning_parsers, collect_tool_parsers, register_parser_file
from ksana.text.parsing import ParserChain, ReasoningParserInfo, ToolParserInfo

PARSER_FILE = """
from ksana import hookimpl
from ksana.text.parsing import ParserChain, ToolParserInfo

@hookimpl
def ksana_tool_parsers(register):
    register(ToolParserInfo("mine", lambda context: ParserChain(None, None), needs_special_tokens=True))
"""


def tool_parser(name: str) -> ToolParserInfo:
    return ToolParserInfo(name, lambda context: ParserChain(None, None))


def plugin_with(*infos: ToolParserInfo) -> SimpleNamespace:
    @hookimpl
    def ksana_tool_parsers(register: object) -> None:
        for info in infos:
            register(info)

    return SimpleNamespace(ksana_tool_parsers=ksana_tool_parsers)


@pytest.fixture
def manager() -> KsanaPluginManager:
    return KsanaPluginManager()


def test_of_two_parsers_of_one_name_the_later_plugins_is_taken(manager: KsanaPluginManager) -> None:
    early, late, other = tool_parser("same"), tool_parser("same"), tool_parser("other")
    manager.register(plugin_with(early, other), "early")
    manager.register(plugin_with(late), "late")
    assert collect_tool_parsers(manager) == {"same": late, "other": other}


def test_reasoning_parsers_are_collected_by_their_own_hook(manager: KsanaPluginManager) -> None:
    info = ReasoningParserInfo("tags", lambda context: None, end_token_text="</r>")

    @hookimpl
    def ksana_reasoning_parsers(register: object) -> None:
        register(info)

    manager.register(SimpleNamespace(ksana_reasoning_parsers=ksana_reasoning_parsers), "reasons")
    assert (collect_reasoning_parsers(manager), collect_tool_parsers(manager)) == ({"tags": info}, {})


def test_a_file_takes_the_place_of_a_parser_of_the_same_name(manager: KsanaPluginManager, tmp_path: Path) -> None:
    file = tmp_path / "my parsers.py"
    file.write_text(PARSER_FILE)
    manager.register(plugin_with(tool_parser("mine")), "installed")
    register_parser_file(manager, file)
    assert collect_tool_parsers(manager)["mine"].needs_special_tokens


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no parser file"),
        ("import no_such_module", "parsers.py does not import: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "parsers.py brings no parsers: it implements none of ksana_tool_parsers and ksana_reasoning_parsers"),
        ("def ksana_tool_parsers(register): ...", "without the @hookimpl mark"),
        (PARSER_FILE.replace("(register)", "(registry)", 1), "has a hook that does not fit"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_the_operator(
    manager: KsanaPluginManager, tmp_path: Path, source: str | None, message: str
) -> None:
    file = tmp_path / "parsers.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(UsageError) as caught:
        register_parser_file(manager, file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
