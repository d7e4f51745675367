"""Hooks around the life of a process: options, configuration, engine start and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    import pluggy

    from ksana.config.options import OptionRegistry
    from ksana.engine.async_engine import AsyncEngine
    from ksana.plugin.manager import KsanaPluginManager
    from ksana.types.config import KsanaConfig


@hookspec(historic=True)
def ksana_addhooks(pluginmanager: pluggy.PluginManager) -> None:
    """Bring hook specifications of your own.

    When: as soon as the plugin is registered, before any other hook of it. Not firstresult; historic.
    Raises: nothing is caught; an exception stops the start as a broken plugin.

    Example::

        @hookimpl
        def ksana_addhooks(pluginmanager):
            pluginmanager.add_hookspecs(my_package.hookspecs)
    """


@hookspec
def ksana_addoption(options: OptionRegistry) -> None:
    """Add command-line options and configuration keys, in a group of your own.

    When: once, after all plugins are registered and before the configuration is composed. Not firstresult.

    Example::

        @hookimpl
        def ksana_addoption(options):
            options.add("router", "policy", str, default="round_robin", help="how workers are chosen")
    """


@hookspec
def ksana_configure(config: KsanaConfig, pluginmanager: KsanaPluginManager) -> None:
    """Check your part of the finished configuration; raise :class:`ksana.errors.UsageError` if it cannot work.

    When: once, before a model is loaded. Not firstresult. ``config`` is immutable. Further plugins that the
    configuration names may be registered with ``pluginmanager``.

    Example::

        @hookimpl
        def ksana_configure(config):
            if config.server.port == config.plugin_options["mine"]["port"]:
                raise UsageError("the server and the mine plugin want the same port")
    """


@hookspec
def ksana_engine_started(engine: AsyncEngine) -> None:
    """The engine answers requests from now on.

    When: once an engine, on the thread that started it. Not firstresult.

    Example::

        @hookimpl
        def ksana_engine_started(engine):
            print(engine.model_config.name)
    """


@hookspec
def ksana_engine_stopping(engine: AsyncEngine, reason: str) -> None:
    """The engine stops: release what you hold. Running requests have already ended or been aborted.

    When: once an engine. Not firstresult. An exception is logged and the stop goes on.

    Example::

        @hookimpl
        def ksana_engine_stopping(engine, reason):
            my_client.close()
    """
