"""Merging the sources, later ones winning, and validating the result part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ksana.config.environment import settings_from_environment
from ksana.config.options import OptionRegistry
from ksana.config.settings import (
    PLUGIN_OPTIONS,
    PLUGINS_PATH,
    Field,
    Path,
    Setting,
    Settings,
    core_fields,
    core_sections,
)
from ksana.config.yaml_file import YamlDocument
from ksana.config.yaml_settings import settings_from_yaml
from ksana.errors import ConfigError
from ksana.plugin.messages import nearest
from ksana.types.config import ConfigPart, KsanaConfig, PluginConfig

PartT = TypeVar("PartT", bound=ConfigPart)

_KUBERNETES_HINT = (
    " (Kubernetes sets this variable for a service named ksana-server: rename the service, or set "
    "enableServiceLinks: false in the pod)"
)


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """The configuration and the history of its values.

    Attributes:
        config: validated, immutable.
        sources: where each value comes from that is not a default.
    """

    config: KsanaConfig
    sources: dict[Path, str]


def compose_config(
    document: YamlDocument | None,
    environ: Mapping[str, str],
    command_line: Settings,
    options: OptionRegistry,
) -> ComposedConfig:
    """Compose the whole configuration: defaults, file, environment, command line.

    Args:
        document: the YAML file, if there is one.
        environ: ``os.environ``, as a rule.
        command_line: values of the flags that were given.
        options: plugins' options; see :func:`ksana.config.options.collect_options`.

    Raises:
        ConfigError: a key is unknown or a value invalid; the message names key, value, source and what is valid.
    """
    plugin_fields = options.fields()
    environment = settings_from_environment(environ, plugin_fields.values())
    settings = _merge(settings_from_yaml(document), environment, command_line)
    parts = {name: _validate_part(part, name, settings) for name, part in core_sections().items()}
    plugin_options = _validate_plugin_options(plugin_fields, settings)
    config_file = "" if document is None else document.file
    config = KsanaConfig.model_validate({**parts, PLUGIN_OPTIONS: plugin_options, "config_file": config_file})
    return ComposedConfig(config, {path: setting.source for path, setting in settings.items()})


def compose_plugin_config(
    document: YamlDocument | None, environ: Mapping[str, str], command_line: Settings
) -> PluginConfig:
    """Compose only what decides which plugins are loaded: it is needed before their options are known.

    Raises:
        ConfigError: as for :func:`compose_config`, but plugins' options are not looked at.
    """
    settings = _merge(settings_from_yaml(document), settings_from_environment(environ), command_line)
    return _validate_part(PluginConfig, "plugins", settings)


def _merge(*sources: Settings) -> Settings:
    """Later sources win; lists of plugins add up instead, since each source may bring its own."""
    merged: Settings = {}
    for source in sources:
        for path, setting in source.items():
            if path == PLUGINS_PATH:
                setting = Setting(_plugin_names(setting), setting.source)
                if path in merged:
                    before = merged[path]
                    setting = Setting(before.value + setting.value, f"{before.source}, {setting.source}")
            merged[path] = setting
    return merged


def _plugin_names(setting: Setting) -> tuple[str, ...]:
    value = setting.value.split(",") if isinstance(setting.value, str) else setting.value
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{setting.source}: {setting.value!r} is not valid: must be a list of plugin names")
    return tuple(name.strip() for name in value if name.strip())


def _validate_part(part: type[PartT], section: str, settings: Settings) -> PartT:
    own = {path[1]: setting for path, setting in settings.items() if path[0] == section and len(path) == 2}
    for name, setting in own.items():
        _refuse_stray_bool(core_fields()[section, name], setting)
    try:
        return part.model_validate({name: setting.value for name, setting in own.items()})
    except ValidationError as error:
        problems = [_describe_problem(core_fields()[section, name], own[name], item) for name, item in _named(error)]
        raise ConfigError("; ".join(problems)) from None


def _named(error: ValidationError) -> list[tuple[str, Any]]:
    """The problems, each with the field that has it."""
    return [(str(item["loc"][0]), item) for item in error.errors()]


def _validate_plugin_options(fields: Mapping[Path, Field], settings: Settings) -> dict[str, dict[str, object]]:
    for path, setting in settings.items():
        if path[0] == PLUGIN_OPTIONS and path not in fields:
            key = ".".join(path)
            hint = nearest(key, (".".join(known) for known in fields))
            raise ConfigError(f"{setting.source}: no loaded plugin has the option {key}{hint}")
    values: dict[str, dict[str, object]] = {}
    for path, field in fields.items():
        values.setdefault(field.group, {})[path[-1]] = _validate_option(field, settings.get(path))
    return values


def _validate_option(field: Field, setting: Setting | None) -> object:
    if setting is None:
        return field.default
    _refuse_stray_bool(field, setting)
    try:
        return TypeAdapter(field.type).validate_python(setting.value)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe_problem(field, setting, item) for item in error.errors())) from None


def _refuse_stray_bool(field: Field, setting: Setting) -> None:
    """Pydantic takes ``true`` for the number 1; in a configuration it is a mistake."""
    if isinstance(setting.value, bool) and not field.accepts_bool:
        raise ConfigError(
            f"{setting.source}: {setting.value!r} is not valid: {field.path[-1]} is not a yes-or-no field"
        )


def _describe_problem(field: Field, setting: Setting, problem: Any) -> str:
    valid = problem["msg"].replace("Input should be", "must be", 1).removeprefix("Value error, ")
    hint = _KUBERNETES_HINT if str(setting.value).startswith("tcp://") else ""
    value = "what it says" if field.is_secret else repr(setting.value)
    return f"{setting.source}: {value} is not valid: {valid[:1].lower()}{valid[1:]}{hint}"
