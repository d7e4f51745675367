"""The parsers of tool calls and of reasoning that plugins bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.plugin.import_file import import_file
from ksana.plugin.manager import KsanaPluginManager

if TYPE_CHECKING:
    from ksana.text.parsing import ReasoningParserInfo, ToolParserInfo

PARSER_HOOKS = ("ksana_tool_parsers", "ksana_reasoning_parsers")


def collect_tool_parsers(plugins: KsanaPluginManager) -> dict[str, ToolParserInfo]:
    """The tool parsers of all plugins by name; a plugin that was registered later wins."""
    found: list[ToolParserInfo] = []
    plugins.hook.ksana_tool_parsers(register=found.append)
    return {info.name: info for info in reversed(found)}


def collect_reasoning_parsers(plugins: KsanaPluginManager) -> dict[str, ReasoningParserInfo]:
    """The reasoning parsers of all plugins by name; a plugin that was registered later wins."""
    found: list[ReasoningParserInfo] = []
    plugins.hook.ksana_reasoning_parsers(register=found.append)
    return {info.name: info for info in reversed(found)}


def register_parser_file(plugins: KsanaPluginManager, file: Path) -> None:
    """Import a Python file and register it as a plugin, called before all others.

    Raises:
        UsageError: there is no such file, it cannot be used as a plugin, or it brings no parsers.
    """
    if not file.is_file():
        raise UsageError(f"there is no parser file {file}")
    module = import_file(file.absolute())
    name = plugins.register(module, f"parser file {file}")
    plugins.check_pending()
    implemented = {caller.name for caller in plugins.get_hookcallers(module) or ()}
    if implemented.isdisjoint(PARSER_HOOKS):
        plugins.unregister(name=name)
        raise UsageError(f"{file} brings no parsers: it implements none of {' and '.join(PARSER_HOOKS)}")
