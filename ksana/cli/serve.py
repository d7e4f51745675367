"""The command ``ksana-serve``.

The command line is read twice, as pytest does it: first the few flags that decide which plugins are loaded, then, with
the plugins' own options known, all of it.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence

import ksana
from ksana.cli.flags import early_parser, full_parser, normalize, plugin_settings, settings_from_flags
from ksana.cli.logging import flush_logging, setup_logging
from ksana.cli.plugins_command import list_command
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: served until it was told to stop. 2: the operator has to change something; one line on stderr says what.
    130: Ctrl-C before the server was up. An unexpected exception keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    setup_logging("info")
    try:
        return _run(normalize(arguments))
    except UsageError as error:
        logger.debug("traceback of the following error", exc_info=True)
        flush_logging()
        print(f"ksana-serve: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    if argv[:1] == ["plugins"]:
        print(list_command(argv[1:], os.environ))
        return EXIT_OK
    early, _ = early_parser().parse_known_args(argv)
    if early.version:
        print(f"ksana {ksana.__version__} (plugin API {API_NUMBER}, Python {platform.python_version()})")
        return EXIT_OK
    document = read_yaml(early.config_file) if early.config_file else None
    manager = _load_plugins(early, document)
    options = collect_options(manager)
    parser = full_parser(options)
    if early.help:
        parser.print_help()
        return EXIT_OK
    composed = compose_config(document, os.environ, settings_from_flags(parser, argv, options), options)
    setup_logging(composed.config.server.log_level)
    warn_of_misspelt_variables(os.environ, options.fields().values())
    if early.print_config:
        print(print_config(composed), end="")
        return EXIT_OK
    return _serve(composed.config, manager)


def _load_plugins(early: Namespace, document: YamlDocument | None) -> KsanaPluginManager:
    settings: Settings = plugin_settings(early)
    if early.autoload is not None:
        settings[AUTOLOAD_PATH] = Setting(early.autoload, "--plugin-autoload")
    return create_plugin_manager(PluginSpecs.from_config(compose_plugin_config(document, os.environ, settings)))


def _serve(config: KsanaConfig, manager: KsanaPluginManager) -> int:
    if not config.model.model:
        raise UsageError(
            "no model given: pass --model with a folder, a .gguf file or a hub name; --model demo tries it"
        )
    from ksana.server.run import serve  # loads aiohttp and torch, which --help and the like start without

    return serve(config, manager)


if __name__ == "__main__":
    sys.exit(main())
