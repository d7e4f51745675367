"""What the commands of Ksana have in common: exit codes, errors in one line, the configuration out of all its sources.

The command line is read twice, as pytest does it: first the few flags that decide which plugins are loaded, then, with
the plugins' own options known, all of it.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ksana
from ksana.cli.flags import CommandLine, early_parser, full_parser, normalize, plugin_settings, settings_from_flags
from ksana.cli.logging import flush_logging, setup_logging
from ksana.config.compose import compose_config, compose_plugin_config
from ksana.config.environment import AUTOLOAD_PATH, warn_of_misspelt_variables
from ksana.config.options import collect_options
from ksana.config.settings import Setting, Settings
from ksana.config.show import print_config
from ksana.config.yaml_file import YamlDocument, read_yaml
from ksana.errors import UsageError
from ksana.markers import API_NUMBER
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.types.config import KsanaConfig

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that a command needs to load a model.

    Attributes:
        config: composed and validated; names a model.
        plugins: loaded.
        own_flags: values of the flags that the command added itself.
    """

    config: KsanaConfig
    plugins: KsanaPluginManager
    own_flags: Namespace


def run_command(name: str, run: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code.

    2: the operator has to change something; one line on stderr says what. 130: Ctrl-C. An unexpected exception keeps
    its traceback.

    Args:
        name: of the command, for its errors.
        run: gets the words of the command line, long flags spelt with dashes.
        argv: those words; None: what the process was started with.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _fill_closed_streams()
    setup_logging("info")
    try:
        return run(normalize(arguments))
    except UsageError as error:
        logger.debug("traceback of the following error", exc_info=True)
        flush_logging()
        print(f"{name}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _fill_closed_streams() -> None:
    """Have descriptors 0 to 2 open on nothing if the process was started without them.

    Otherwise files and sockets get these numbers: libraries print into them, and libuv aborts when one is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def prepare_start(argv: list[str], command: CommandLine) -> Start | None:
    """Read all of the configuration and load the plugins, or answer a question such as ``--help``.

    Returns:
        None if a question was answered: then there is nothing left to do.

    Raises:
        UsageError: a flag, a setting or a plugin is wrong, or no model is given.
    """
    early, _ = early_parser(command).parse_known_args(argv)
    if early.version:
        print(f"ksana {ksana.__version__} (plugin API {API_NUMBER}, Python {platform.python_version()})")
        return None
    document = read_yaml(early.config_file) if early.config_file else None
    plugins = _load_plugins(early, document)
    options = collect_options(plugins)
    parser = full_parser(options, command)
    if early.help:
        parser.print_help()
        return None
    composed = compose_config(document, os.environ, settings_from_flags(parser, argv, options), options)
    setup_logging(composed.config.server.log_level)
    warn_of_misspelt_variables(os.environ, options.fields().values())
    if early.print_config:
        print(print_config(composed), end="")
        return None
    if not composed.config.model.model:
        raise UsageError(
            "no model given: pass --model with a folder, a .gguf file or a hub name; --model demo tries it"
        )
    return Start(composed.config, plugins, early)


def _load_plugins(early: Namespace, document: YamlDocument | None) -> KsanaPluginManager:
    settings: Settings = plugin_settings(early)
    if early.autoload is not None:
        settings[AUTOLOAD_PATH] = Setting(early.autoload, "--plugin-autoload")
    return create_plugin_manager(PluginSpecs.from_config(compose_plugin_config(document, os.environ, settings)))
