"""From keyword arguments to a configuration and its plugins, for programs that start an engine themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ksana.config.compose import compose_config, compose_plugin_config
from ksana.config.options import collect_options
from ksana.config.settings import Path, Setting, Settings, core_fields
from ksana.errors import ConfigError
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.messages import nearest
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.types.config import KsanaConfig


def configure(
    caller: str, model: str | os.PathLike[str], options: Mapping[str, Any], defaults: Mapping[Path, Any] | None = None
) -> tuple[KsanaConfig, KsanaPluginManager]:
    """Compose the configuration out of the environment and ``options``, load the plugins, and let them check it.

    Args:
        caller: what the user called, for messages.
        model: as ``ksana-serve --model``.
        options: fields of the configuration by their last name, for example ``num_blocks``, or by their flag's.
        defaults: values for what ``options`` leaves out, by path.

    Raises:
        UsageError: an option or a plugin is wrong.
    """
    settings: Settings = {path: Setting(value, caller) for path, value in (defaults or {}).items()}
    fields = core_fields()
    paths = {path[-1]: path for path in fields}
    paths |= {field.flag.lstrip("-").replace("-", "_"): path for path, field in fields.items()}
    for name, value in options.items():
        if name not in paths:
            raise ConfigError(f"{caller} has no option {name!r}{nearest(name, paths)}")
        settings[paths[name]] = Setting(value, f"{caller}({name}=...)")
    settings["model", "model"] = Setting(os.fspath(model), f"{caller}(model)")
    manager = create_plugin_manager(PluginSpecs.from_config(compose_plugin_config(None, os.environ, settings)))
    config = compose_config(None, os.environ, settings, collect_options(manager)).config
    manager.configure(config)
    return config, manager
