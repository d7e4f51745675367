"""From a picklable description to a manager: the same plugins, in the same order, in every process."""

from __future__ import annotations

from dataclasses import dataclass

from ksana.plugin.builtin_list import BUILTIN_PLUGINS
from ksana.plugin.discovery import (
    check_disabled,
    find_entry_points,
    import_builtin,
    import_named_module,
    load_entry_point,
)
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.model_dir import ModelDirPlugin, register_model_dir_plugin
from ksana.types.config import PluginConfig

_DISABLE_PREFIX = "no:"


@dataclass(frozen=True, slots=True)
class PluginSpecs:
    """Which plugins an engine has. Frozen and picklable: a child process rebuilds the same manager from it.

    Attributes:
        modules: modules, or names of entry points, to load beside the others, in order.
        disabled: names of plugins to keep out.
        autoload: load every installed plugin.
        model_dir: the plugin of the model's folder, once it is found and trusted.
    """

    modules: tuple[str, ...] = ()
    disabled: frozenset[str] = frozenset()
    autoload: bool = True
    model_dir: ModelDirPlugin | None = None

    @classmethod
    def from_config(cls, config: PluginConfig, model_dir: ModelDirPlugin | None = None) -> PluginSpecs:
        """Read ``-p`` values: ``NAME`` loads, ``no:NAME`` keeps out, the last word about a name counts."""
        wanted: dict[str, bool] = {}
        for entry in config.plugins:
            name = entry.strip()
            load = not name.startswith(_DISABLE_PREFIX)
            name = name.removeprefix(_DISABLE_PREFIX)
            if name:
                wanted.pop(name, None)
                wanted[name] = load
        modules = tuple(name for name, load in wanted.items() if load)
        disabled = frozenset(name for name, load in wanted.items() if not load)
        return cls(modules, disabled, config.autoload, model_dir)


def create_plugin_manager(specs: PluginSpecs) -> KsanaPluginManager:
    """Register all plugins of ``specs``: builtins, entry points by name, named modules, the model folder's plugin.

    Registered later means called first, so what is closer to the operator overrules what is further away.

    Raises:
        PluginLoadError: a plugin is broken; the message says how to start without it.
        UsageError: ``no:NAME`` for an unknown or an essential plugin.
    """
    check_disabled(specs.disabled, specs.modules)
    manager = KsanaPluginManager()
    for name in BUILTIN_PLUGINS:
        if name not in specs.disabled:
            manager.register(import_builtin(name), name)
    _register_installed(manager, specs)
    if specs.model_dir is not None:
        register_model_dir_plugin(manager, specs.model_dir)
    manager.check_pending()
    return manager


def _register_installed(manager: KsanaPluginManager, specs: PluginSpecs) -> None:
    entry_points = find_entry_points()
    automatic = [name for name in entry_points if specs.autoload and name not in specs.modules]
    for name in [*automatic, *specs.modules]:
        if name in specs.disabled:
            continue
        if name in entry_points:
            plugin, distribution = load_entry_point(entry_points[name])
        else:
            plugin, distribution = import_named_module(name), None
        if not manager.is_registered(plugin):  # -p may name the module of an entry point or of a builtin
            manager.register(plugin, name, distribution=distribution)
