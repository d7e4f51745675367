"""The plugin manager: pluggy's, with Ksana's specifications, API number and error messages."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pluggy

from ksana.errors import PluginLoadError, UsageError
from ksana.hookspecs import ALL_HOOKSPECS
from ksana.markers import API_NUMBER, PROJECT_NAME
from ksana.plugin.messages import describe_cause, describe_plugin, nearest
from ksana.plugin.tracing import trace_hook_calls

if TYPE_CHECKING:
    from ksana.types.config import KsanaConfig

TRACE_VARIABLE = "KSANA_TRACE_PLUGINS"


class KsanaPluginManager(pluggy.PluginManager):
    """Holds the plugins of one engine. There is no global one; a child process builds its own from ``PluginSpecs``."""

    def __init__(self) -> None:
        super().__init__(PROJECT_NAME)
        for module in ALL_HOOKSPECS:
            self.add_hookspecs(module)
        self.hook.ksana_addhooks.call_historic(kwargs={"pluginmanager": self})
        if os.environ.get(TRACE_VARIABLE, "").strip() not in ("", "0"):
            trace_hook_calls(self)

    def register(self, plugin: Any, name: str | None = None, *, distribution: str | None = None) -> str | None:
        """Register a module or an instance and return its name. The plugin registered last is called first.

        Args:
            plugin: a module, or an instance of a class, with functions marked by ``hookimpl``.
            name: the name that ``-p no:NAME`` uses; default: the module's name.
            distribution: the installed package it comes from, for messages.

        Raises:
            PluginLoadError: ``plugin`` is a class, speaks another API number, implements a hook with wrong
                parameters, or its name is taken.
        """
        name = name or self.get_canonical_name(plugin)
        label = describe_plugin(name, distribution)
        if inspect.isclass(plugin):
            raise PluginLoadError(
                f"{label} is the class {plugin.__name__}: register an instance of it, {plugin.__name__}()"
            )
        check_api_number(plugin, label)
        if self.has_plugin(name) or self.is_registered(plugin):
            raise PluginLoadError(
                f"{label} cannot be registered: another plugin has this name, or it is registered twice"
            )
        try:
            return super().register(plugin, name)
        except pluggy.PluginValidationError as error:
            raise PluginLoadError(f"{label} has a hook that does not fit: {' '.join(str(error).split())}") from error
        except UsageError:
            raise
        except Exception as error:  # its ksana_addhooks, which runs here
            raise PluginLoadError(f"{label} fails while it is registered: {describe_cause(error)}") from error

    def check_pending(self) -> None:
        """Refuse hooks that nobody specifies, and functions with a hook's name that lack the ``hookimpl`` mark.

        Call it after all plugins are registered: a plugin may implement a hook that a later one specifies.

        Raises:
            PluginLoadError: naming the plugin, the function and the nearest hook.
        """
        specified = {name: caller for name, caller in self._hook_callers() if caller.has_spec()}
        for name, caller in self._hook_callers():
            for impl in () if name in specified else caller.get_hookimpls():
                if not impl.optionalhook:
                    hint = nearest(name, specified)
                    raise PluginLoadError(f"plugin {impl.plugin_name!r} implements {name}, which is not a hook{hint}")
        for plugin_name, plugin in self.list_name_plugin():
            for name in specified:
                if _is_unmarked_function(plugin, name):
                    raise PluginLoadError(
                        f"plugin {plugin_name!r} defines {name} without the @hookimpl mark, so it would never be called"
                    )

    def configure(self, config: KsanaConfig) -> None:
        """Let every plugin check its part of the finished configuration.

        Raises:
            UsageError: what a plugin objects to, or that its ``ksana_configure`` failed.
        """
        try:
            self.hook.ksana_configure(config=config, pluginmanager=self)
        except UsageError:
            raise
        except Exception as error:
            raise PluginLoadError(f"a plugin fails to check the configuration: {describe_cause(error)}") from error

    def _hook_callers(self) -> list[tuple[str, pluggy.HookCaller]]:
        return [(name, value) for name, value in vars(self.hook).items() if isinstance(value, pluggy.HookCaller)]


def check_api_number(plugin: object, label: str) -> None:
    """Refuse a plugin whose ``ksana_api`` differs from ours; without the attribute it is taken to be current.

    Raises:
        PluginLoadError: naming both numbers.
    """
    number = getattr(plugin, "ksana_api", API_NUMBER)
    if number != API_NUMBER:
        raise PluginLoadError(
            f"{label} is written for plugin API {number!r}, this Ksana has plugin API {API_NUMBER}: "
            f"install a release of the plugin, or of ksana, that matches"
        )


def _is_unmarked_function(plugin: object, name: str) -> bool:
    member = inspect.getattr_static(plugin, name, None)
    if not inspect.isfunction(member):
        return False
    return not hasattr(member, f"{PROJECT_NAME}_impl") and not hasattr(member, f"{PROJECT_NAME}_spec")
