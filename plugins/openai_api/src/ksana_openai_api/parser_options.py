"""The options by which an operator chooses parsers. Loads nothing: they are asked for by ``--help`` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana.config.options import OptionRegistry

OPTION_GROUP = "openai_api"


def add_parser_options(options: OptionRegistry) -> None:
    """Add the options by which parsers are chosen, under the names that they have elsewhere."""
    options.add(
        OPTION_GROUP,
        "enable_auto_tool_choice",
        bool,
        default=False,
        help="let the model decide whether it calls a tool; needs --tool-call-parser",
        flag="--enable-auto-tool-choice",
    )
    options.add(
        OPTION_GROUP,
        "tool_call_parser",
        str,
        default="",
        help="format in which the model writes tool calls, for example hermes; a wrong name lists them all",
        flag="--tool-call-parser",
    )
    options.add(
        OPTION_GROUP,
        "reasoning_parser",
        str,
        default="",
        help="how the model marks its reasoning, for example qwen3; a wrong name lists them all",
        flag="--reasoning-parser",
    )
    options.add(
        OPTION_GROUP,
        "tool_parser_plugin",
        str,
        default="",
        help="Python file with further parsers, as a plugin",
        flag="--tool-parser-plugin",
    )
