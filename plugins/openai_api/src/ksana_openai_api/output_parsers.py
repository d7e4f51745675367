"""Which parsers the operator has chosen for the text of chat answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ksana.errors import UsageError
from ksana.plugin.messages import nearest
from ksana.plugin.output_parsers import collect_reasoning_parsers, collect_tool_parsers, register_parser_file
from ksana.text.parsing import OutputParser, ParserChain, ParserContext, ReasoningParserInfo, ToolParserInfo
from ksana_openai_api.parser_options import OPTION_GROUP

if TYPE_CHECKING:
    from ksana.plugin.manager import KsanaPluginManager
    from ksana.types.config import KsanaConfig

_Info = TypeVar("_Info", ToolParserInfo, ReasoningParserInfo)


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """The chosen parsers.

    Attributes:
        tool: reads tool calls; None if the operator chose no format.
        reasoning: reads reasoning; None if all text is content.
        auto_tool_choice: a request may leave it to the model whether a tool is called.
    """

    tool: ToolParserInfo | None = None
    reasoning: ReasoningParserInfo | None = None
    auto_tool_choice: bool = False

    @classmethod
    def choose(cls, config: KsanaConfig, plugins: KsanaPluginManager) -> ChatParsers:
        """Find the parsers that the options name among those of the plugins.

        Raises:
            UsageError: there is none of that name, or an option lacks another one that it needs.
        """
        options = config.plugin_options.get(OPTION_GROUP, {})
        tool = reasoning = None
        if name := options.get("tool_call_parser"):
            tool = _find(collect_tool_parsers(plugins), str(name), "--tool-call-parser")
        if name := options.get("reasoning_parser"):
            reasoning = _find(collect_reasoning_parsers(plugins), str(name), "--reasoning-parser")
        auto = bool(options.get("enable_auto_tool_choice"))
        if auto and tool is None:
            raise UsageError("--enable-auto-tool-choice needs --tool-call-parser, the format of the model's tool calls")
        return cls(tool, reasoning, auto)

    def create(self, context: ParserContext, *, with_tools: bool) -> OutputParser | None:
        """The parser of one answer.

        Args:
            with_tools: look for tool calls.

        Returns:
            None if there is nothing to look for: all text is content.
        """
        reasoning = self.reasoning.create(context) if self.reasoning else None
        tools = self.tool.create(context) if self.tool and with_tools else None
        return ParserChain(reasoning, tools) if reasoning or tools else None


def load_parser_file(config: KsanaConfig, plugins: KsanaPluginManager) -> None:
    """Register the file of ``--tool-parser-plugin``, if there is one.

    Raises:
        UsageError: it cannot be used.
    """
    file = config.plugin_options.get(OPTION_GROUP, {}).get("tool_parser_plugin")
    if file:
        register_parser_file(plugins, Path(str(file)).expanduser())


def _find(parsers: Mapping[str, _Info], name: str, flag: str) -> _Info:
    if name not in parsers:
        known = ", ".join(sorted(parsers))
        raise UsageError(f"{flag}: there is no parser {name!r}{nearest(name, parsers)} (known: {known})")
    return parsers[name]
