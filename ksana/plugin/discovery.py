"""Finding plugins: builtins, entry points of installed packages, and modules named by the operator."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from ksana.errors import PluginLoadError, UsageError
from ksana.plugin.builtin_list import BUILTIN_PLUGINS, ESSENTIAL_PLUGINS
from ksana.plugin.messages import describe_cause, describe_plugin, nearest

ENTRY_POINT_GROUP = "ksana"


@dataclass(frozen=True, slots=True)
class PluginListing:
    """What is known about a plugin without importing it.

    Attributes:
        name: the name that ``-p no:NAME`` uses.
        module: dotted module, or ``module:attribute``.
        distribution: installed package that brings it; empty for a module named with ``-p``.
        version: version of that package.
        status: ``builtin``, ``essential builtin``, ``installed``, ``named`` (by ``-p``), ``disabled``,
            ``not loaded`` (autoload is off) or ``name is taken`` (by the plugin above it).
    """

    name: str
    module: str
    distribution: str
    version: str
    status: str

    @property
    def source(self) -> str | None:
        """Distribution and version for messages, or None."""
        return f"{self.distribution} {self.version}".strip() or None


def list_plugins(
    modules: tuple[str, ...] = (), disabled: frozenset[str] = frozenset(), *, autoload: bool = True
) -> list[PluginListing]:
    """List builtins, entry points and named modules in the order of registration, importing none of them.

    Never raises for a broken or conflicting plugin: this is where an operator looks when nothing else works.
    """
    listings = [_builtin_listing(name, disabled) for name in BUILTIN_PLUGINS]
    taken = set(BUILTIN_PLUGINS)
    for entry_point in _scan_entry_points():
        name = entry_point.name
        status = "installed" if autoload or name in modules else "not loaded"
        status = "disabled" if name in disabled else status
        listings.append(_listing_of(entry_point, "name is taken" if name in taken else status))
        taken.add(name)
    named = [PluginListing(module, module, "", "", "named") for module in modules if module not in taken]
    return listings + named


def find_entry_points() -> dict[str, metadata.EntryPoint]:
    """Entry points of the group ``ksana``, sorted by name, without importing their modules.

    Raises:
        PluginLoadError: two packages claim one name, or a name belongs to a builtin.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for entry_point in _scan_entry_points():
        name = entry_point.name
        source = _listing_of(entry_point, "").source
        if name in BUILTIN_PLUGINS:
            raise PluginLoadError(
                f"package {source} has an entry point {name!r}, which is the name of a builtin plugin; uninstall it"
            )
        if name in found:
            other = _listing_of(found[name], "").source
            raise PluginLoadError(f"packages {other} and {source} both bring a plugin {name!r}; uninstall one")
        found[name] = entry_point
    return found


def import_builtin(name: str) -> ModuleType:
    """Import the builtin plugin ``name``."""
    return importlib.import_module(BUILTIN_PLUGINS[name])


def load_entry_point(entry_point: metadata.EntryPoint) -> tuple[Any, str | None]:
    """Import an installed plugin; return it and the description of its package.

    Raises:
        PluginLoadError: naming the package, the cause and the way to start without it.
    """
    source = _listing_of(entry_point, "").source
    try:
        return entry_point.load(), source
    except (Exception, SystemExit) as error:
        label = describe_plugin(entry_point.name, source)
        raise PluginLoadError(
            f"{label} does not import: {describe_cause(error)}; "
            f"mend or uninstall the package, or start without it: -p no:{entry_point.name}"
        ) from error


def import_named_module(module: str) -> ModuleType:
    """Import a module named with ``-p`` or ``KSANA_PLUGINS``.

    Raises:
        PluginLoadError: it is not found or does not import.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise PluginLoadError(f"{describe_plugin(module)} does not import: {describe_cause(error)}") from error
        hint = nearest(module, find_entry_points())
        raise PluginLoadError(
            f"{describe_plugin(module)} is neither an installed plugin nor a module on the Python path{hint}; "
            f"'ksana-serve plugins' lists what is installed, PYTHONPATH adds folders"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"{describe_plugin(module)} does not import: {describe_cause(error)}") from error


def check_disabled(disabled: frozenset[str], modules: tuple[str, ...]) -> None:
    """Refuse ``no:NAME`` for a name that nobody has, and for a builtin that nothing works without.

    Raises:
        UsageError: naming the known plugins.
    """
    known = [*BUILTIN_PLUGINS, *find_entry_points(), *modules]
    for name in sorted(disabled):
        if name in ESSENTIAL_PLUGINS:
            raise UsageError(
                f"-p no:{name}: this builtin plugin cannot be disabled, nothing runs without it; "
                f"plugins that answer the same hooks come before it"
            )
        if name not in known:
            names = ", ".join(dict.fromkeys(known))
            raise UsageError(f"-p no:{name}: there is no plugin {name!r}{nearest(name, known)} (known: {names})")


def _scan_entry_points() -> list[metadata.EntryPoint]:
    return sorted(set(metadata.entry_points(group=ENTRY_POINT_GROUP)), key=lambda e: (e.name, e.value))


def _builtin_listing(name: str, disabled: frozenset[str]) -> PluginListing:
    status = "essential builtin" if name in ESSENTIAL_PLUGINS else "builtin"
    return PluginListing(name, BUILTIN_PLUGINS[name], "ksana", "", "disabled" if name in disabled else status)


def _listing_of(entry_point: metadata.EntryPoint, status: str) -> PluginListing:
    dist = entry_point.dist
    if dist is None:
        return PluginListing(entry_point.name, entry_point.value, "", "", status)
    return PluginListing(entry_point.name, entry_point.value, dist.name, dist.version, status)
