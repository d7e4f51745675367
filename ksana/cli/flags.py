"""Flags: one for every field of the configuration and every option of a plugin."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ksana.config.options import OptionRegistry
from ksana.config.settings import PLUGINS_PATH, Field, Path, Setting, Settings, core_fields, core_sections
from ksana.errors import UsageError
from ksana.plugin.messages import nearest

_ALIASES: dict[Path, tuple[str, ...]] = {("model", "tokenizer"): ("--tokenizer-path",)}
"""Flags of the original engine under which a field is known too."""


def _no_flags(group: argparse._ActionsContainer) -> None:
    """What a command adds that has no flags of its own."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What distinguishes one command that takes the flags of the configuration from another.

    Attributes:
        name: as it is typed.
        usage, description, epilog: its help text, around the list of flags.
        add_flags: adds its own flags.
        omitted: fields of the configuration that mean nothing to it and get no flag.
    """

    name: str
    usage: str
    description: str
    epilog: str
    add_flags: Callable[[argparse._ActionsContainer], None] = _no_flags
    omitted: frozenset[Path] = frozenset()


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UsageError` where argparse would end the process."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into ours."""
        raise UsageError(message)


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag whose value is an integer of at least ``least``."""

    def parse(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{word!r} is not valid: must be an integer of at least {least}")
        return value

    return parse


def normalize(argv: Sequence[str]) -> list[str]:
    """Spell long flags with dashes: ``--config_file=x`` -> ``--config-file=x``. Values are left alone."""
    normalized: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        normalized.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
    return normalized


def early_parser(command: CommandLine | None = None) -> CommandParser:
    """The flags that must be understood before plugins are loaded, because they decide which, and a command's own."""
    parser = CommandParser()
    _add_start_flags(parser)
    if command is not None:
        command.add_flags(parser)
    parser.add_argument("--plugin-autoload", dest="autoload", action=argparse.BooleanOptionalAction, default=None)
    return parser


def full_parser(options: OptionRegistry, command: CommandLine) -> CommandParser:
    """The whole command line, plugins' options included, in groups."""
    parser = CommandParser(
        prog=command.name,
        usage=command.usage,
        description=command.description,
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    start = parser.add_argument_group("start")
    command.add_flags(start)
    _add_start_flags(start)
    fields = {path: field for path, field in core_fields().items() if path not in command.omitted | {PLUGINS_PATH}}
    for section, part in core_sections().items():
        group = parser.add_argument_group(section, _first_line(part.__doc__))
        _add_fields(group, (field for path, field in fields.items() if path[0] == section))
    for name in dict.fromkeys(field.group for field in options.fields().values()):
        group = parser.add_argument_group(name, "Options of a plugin.")
        _add_fields(group, (field for field in options.fields().values() if field.group == name))
    return parser


def settings_from_flags(parser: CommandParser, argv: Sequence[str], options: OptionRegistry) -> Settings:
    """Parse the whole command line into settings.

    Raises:
        UsageError: an unknown flag, with the nearest known one, or a flag without its value.
    """
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(_describe_unknown(unknown, parser))
    given = vars(namespace)
    settings: Settings = {}
    for path, field in [*core_fields().items(), *options.fields().items()]:
        if path == PLUGINS_PATH:
            continue
        if (value := given.get(_dest(field))) is not None:
            settings[path] = Setting(value, _off_flag(field) if value is False else field.flag)
    return settings | plugin_settings(namespace)


def plugin_settings(namespace: argparse.Namespace) -> Settings:
    """The value of ``-p`` as a setting."""
    return {PLUGINS_PATH: Setting(tuple(namespace.plugins), "-p")} if namespace.plugins else {}


def _add_start_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("--config-file", metavar="FILE", help="YAML file with settings")
    parser.add_argument("--print-config", action="store_true", help="show the merged settings as YAML and stop")
    parser.add_argument(
        "-p",
        dest="plugins",
        metavar="NAME",
        action="append",
        default=[],
        help="load a module as a plugin; no:NAME keeps an installed one out; may be repeated",
    )


def _add_fields(group: argparse._ArgumentGroup, fields: Iterable[Field]) -> None:
    for field in fields:
        if field.type is bool:
            _add_switch(group, field)
            continue
        flags = (field.flag, *_ALIASES.get(field.path, ()))
        group.add_argument(
            *flags,
            dest=_dest(field),
            action="append" if field.is_list else "store",
            metavar=_metavar(field),
            help=_help(field, "" if field.is_list else str(field.default)),
        )


def _add_switch(group: argparse._ArgumentGroup, field: Field) -> None:
    """Add ``--x`` and ``--no-x``, of which the help shows the one that changes something."""
    for flag, value in ((field.flag, True), (_off_flag(field), False)):
        # "do not ... (default: on)" would read as if not doing it were the default.
        text = _help(field, "off") if value else f"do not {_help(field, '')}"
        shown = text if value != field.default else argparse.SUPPRESS
        group.add_argument(flag, dest=_dest(field), action="store_const", const=value, help=shown)


def _off_flag(field: Field) -> str:
    return "--no-" + field.flag.removeprefix("--")


def _metavar(field: Field) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    if field.type in (int, float):
        return "N"
    for kind, word in (("file", "FILE"), ("folder", "DIR")):
        if re.match(rf"(\w+:? )?{kind}\b", field.help):
            return word
    word = field.path[-1].rsplit("_", 1)[-1].upper()
    return word.removesuffix("S") if field.is_list else word


def _help(field: Field, default: str) -> str:
    text = f"{field.help} (default: {default})" if default else field.help
    return text.replace("%", "%%")


def _dest(field: Field) -> str:
    return ".".join(field.path)


def _first_line(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n")[0]


def _describe_unknown(unknown: list[str], parser: CommandParser) -> str:
    word = unknown[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; a model is given with --model {word}"
    name = word.partition("=")[0]
    known = [flag for action in parser._actions for flag in action.option_strings]
    return f"unknown flag {name}{nearest(name, known)}"
