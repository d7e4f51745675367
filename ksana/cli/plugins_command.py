"""``ksana-serve plugins``: what is installed, read from metadata alone, so that it works when a plugin is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ksana.cli.flags import CommandParser, early_parser, plugin_settings
from ksana.config.compose import compose_plugin_config
from ksana.config.yaml_file import read_yaml
from ksana.errors import UsageError
from ksana.plugin.discovery import PluginListing, list_plugins
from ksana.plugin.spec import PluginSpecs

_HELP = """usage: ksana-serve plugins [-p NAME] [--config-file FILE]

List the plugins that a start with the same -p, file and environment loads, in the order in which they are registered.
None is imported, so that the list works when a plugin is broken."""

_HEADER = PluginListing("NAME", "MODULE", "PACKAGE", "", "STATUS")


def list_command(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the table of plugins, in the order of registration, or the help text if ``argv`` asks for that."""
    parser: CommandParser = early_parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(f"plugins: unexpected {unknown[0]!r}; only -p and --config-file apply")
    if namespace.help:
        return _HELP
    document = read_yaml(namespace.config_file) if namespace.config_file else None
    specs = PluginSpecs.from_config(compose_plugin_config(document, environ, plugin_settings(namespace)))
    rows = [_HEADER, *list_plugins(specs.modules, specs.disabled, autoload=specs.autoload)]
    cells = [(row.name, row.status, f"{row.distribution} {row.version}".strip() or "-", row.module) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in cells
    )
