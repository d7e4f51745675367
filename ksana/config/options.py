"""Options that plugins add: each has a command-line flag, an environment variable and a place in the YAML file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ksana.config.settings import PLUGIN_OPTIONS, Field, Path, core_fields, core_sections, env_name, flag_name
from ksana.errors import PluginLoadError

if TYPE_CHECKING:
    from ksana.plugin.manager import KsanaPluginManager

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class OptionRegistry:
    """Collects plugins' options; handed to ``ksana_addoption``, one view per plugin."""

    def __init__(self) -> None:
        self._owner = "the core"
        self._fields: dict[Path, Field] = {}
        self._owners: dict[str, str] = {field.flag: self._owner for field in core_fields().values()}

    def add(self, group: str, name: str, type: Any, *, default: Any, help: str, flag: str = "", env: str = "") -> None:
        """Add an option; its value is found in ``config.plugin_options[group][name]``.

        Args:
            group: short name of the plugin; flag ``--GROUP-NAME``, variable ``KSANA_GROUP_NAME``, YAML key
                ``plugin_options.GROUP.NAME``.
            name: name within the group, in lower case with underscores.
            type: ``str``, ``int``, ``float``, ``bool``, ``Literal["a", "b"]`` or any other type pydantic validates;
                ``pydantic.SecretStr`` for a password or a key, which is then shown nowhere.
            default: value if nobody sets it; must be valid.
            help: one line for ``--help``.
            flag: a flag that operators know the option by, instead of the one made of group and name.
            env: an environment variable that they know it by, likewise.

        Raises:
            PluginLoadError: the name is malformed, the default invalid, or the option exists already.
        """
        for word in (group, name):
            if not _NAME.fullmatch(word):
                raise PluginLoadError(f"plugin {self._owner!r}: {word!r} is no name for an option: use a-z, 0-9 and _")
        if group in core_sections():
            raise PluginLoadError(
                f"plugin {self._owner!r} adds an option to the group {group!r}, which is a section of the core"
            )
        flag = flag or flag_name(group, name)
        if flag in self._owners:
            raise PluginLoadError(
                f"plugin {self._owner!r} adds the option {flag}, which {self._owners[flag]!r} already has"
            )
        try:
            default = TypeAdapter(type).validate_python(default)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise PluginLoadError(f"plugin {self._owner!r}: the default of {flag} is invalid: {reason}") from error
        path = (PLUGIN_OPTIONS, group, name)
        self._fields[path] = Field(path, type, default, help, flag, env or env_name(group, name))
        self._owners[flag] = self._owner

    def fields(self) -> dict[Path, Field]:
        """All options by path, sorted by group, within a group in the order of addition."""
        return dict(sorted(self._fields.items(), key=lambda item: item[0][1]))

    def view_for(self, owner: str) -> OptionRegistry:
        """The same registry, adding in the name of ``owner``."""
        view = OptionRegistry.__new__(OptionRegistry)
        view._owner, view._fields, view._owners = owner, self._fields, self._owners
        return view


def collect_options(manager: KsanaPluginManager) -> OptionRegistry:
    """Ask every plugin for its options, each by itself, so that a collision can name both plugins."""
    registry = OptionRegistry()
    impls = manager.hook.ksana_addoption.get_hookimpls()
    for impl in impls:
        others = [other.plugin for other in impls if other.plugin is not impl.plugin]
        caller = manager.subset_hook_caller("ksana_addoption", others)
        caller(options=registry.view_for(impl.plugin_name))
    return registry
