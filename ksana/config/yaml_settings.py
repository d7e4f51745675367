"""From a YAML file to settings: our own sections and the original engine's keys, in one file if need be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ksana.config.settings import PLUGIN_OPTIONS, Path, Setting, Settings, core_fields
from ksana.config.yaml_file import YamlDocument
from ksana.config.yaml_keys import ORIGINAL_KEYS, MappedKey, RefusedKey
from ksana.errors import ConfigError
from ksana.plugin.messages import nearest

_OWN_KEYS: dict[str, MappedKey | RefusedKey] = {".".join(path): MappedKey(path) for path in core_fields()}
_KEYS = {**_OWN_KEYS, **ORIGINAL_KEYS}
_GROUPS = {key.rsplit(".", depth)[0] for key in _KEYS for depth in range(1, key.count(".") + 1)} | {PLUGIN_OPTIONS}


def settings_from_yaml(document: YamlDocument | None) -> Settings:
    """Flatten the file into settings; plugins' options are taken as they are and checked when plugins are known.

    Raises:
        ConfigError: a key is unknown, has no meaning here, or two keys set the same field.
    """
    settings: Settings = {}
    if document is None:
        return settings
    for key, value in _leaves("", document.content, document.file):
        source = f"{document.file}: {key}"
        placed = _place(key, value, source)
        if placed is None:
            continue
        path, value = placed
        if path in settings:
            raise ConfigError(f"{source} sets the same as {settings[path].source}; keep one of the two")
        settings[path] = Setting(value, source)
    return settings


def _leaves(prefix: str, content: dict[Any, Any], file: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in _KEYS or (key.startswith(f"{PLUGIN_OPTIONS}.") and key.count(".") == 2):
            yield key, value
        elif key in _GROUPS or key.startswith(f"{PLUGIN_OPTIONS}."):
            if value is not None and not isinstance(value, dict):
                raise ConfigError(f"{file}: {key} must hold keys of its own, not {value!r}")
            yield from _leaves(f"{key}.", value or {}, file)
        else:
            raise ConfigError(f"{file}: unknown key {key}{_suggestion(key)}")


def _place(key: str, value: Any, source: str) -> tuple[Path, Any] | None:
    """Return where the value belongs, converted, or None if it asks for nothing."""
    entry = _KEYS.get(key)
    if isinstance(entry, RefusedKey):
        if value is None or value in entry.harmless:
            return None
        raise ConfigError(f"{source}: {value!r} is not available: {entry.reason}{_harmless_values(entry)}")
    if value is None:
        raise ConfigError(f"{source} has no value; give it one or remove the key")
    if entry is None:
        return tuple(key.split(".")), value
    try:
        converted = entry.convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {value!r} is not valid: {error}") from error
    return None if converted is None else (entry.path, converted)


def _harmless_values(entry: RefusedKey) -> str:
    if not entry.harmless:
        return "; remove the key"
    return f"; remove the key (it may be {' or '.join(map(str, entry.harmless))})"


def _suggestion(key: str) -> str:
    """The same last word elsewhere is the likeliest mistake, then a similar key."""
    last = key.rsplit(".", 1)[-1]
    same = [known for known in _KEYS if known.rsplit(".", 1)[-1] == last]
    return f"; did you mean {same[0]}?" if same else nearest(key, _KEYS)
