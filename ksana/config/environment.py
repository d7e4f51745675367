"""From environment variables to settings: ``KSANA_<PART>_<FIELD>``, and what the original engine reads."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping

from ksana.config.settings import PLUGINS_PATH, Field, Path, Setting, Settings, core_fields, core_sections
from ksana.errors import ConfigError

logger = logging.getLogger(__name__)

AUTOLOAD_PATH = ("plugins", "autoload")
PLUGINS_VARIABLE = "KSANA_PLUGINS"
DISABLE_AUTOLOAD_VARIABLE = "KSANA_DISABLE_PLUGIN_AUTOLOAD"

_ORIGINAL_VARIABLES: dict[str, Path] = {
    "KLLM_LOG_LEVEL": ("server", "log_level"),
    "KLLM_MAX_DEVICE_BLOCKS": ("cache", "num_blocks"),
}
_SHORT_VARIABLES: dict[str, Path] = {"KSANA_API_KEY": ("server", "api_keys")}
"""Variables under which a field is known beside its regular one, which wins."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TYPO_RATIO = 0.85
"""Similarity above which an unknown variable is taken for a misspelt one. The environment holds variables that others
put there (Kubernetes adds KSANA_SERVER_SERVICE_HOST for a service of that name), so unknown ones are no error."""


def settings_from_environment(environ: Mapping[str, str], plugin_fields: Iterable[Field] = ()) -> Settings:
    """Read the variables of the core and of plugins' options. An empty variable counts as unset.

    Raises:
        ConfigError: ``KSANA_DISABLE_PLUGIN_AUTOLOAD`` is neither true nor false.
    """
    settings: Settings = {}
    for variable, path in _ORIGINAL_VARIABLES.items():
        if value := environ.get(variable, "").strip():
            settings[path] = Setting(value.lower(), _source(variable))
    for variable, path in _SHORT_VARIABLES.items():
        if value := environ.get(variable, "").strip():
            settings[path] = Setting(value, _source(variable))
    own = [field for path, field in core_fields().items() if path not in (PLUGINS_PATH, AUTOLOAD_PATH)]
    for field in [*own, *plugin_fields]:
        if value := environ.get(field.env, "").strip():
            settings[field.path] = Setting(value, _source(field.env))
    if value := environ.get(PLUGINS_VARIABLE, "").strip():
        settings[PLUGINS_PATH] = Setting(value, _source(PLUGINS_VARIABLE))
    if value := environ.get(DISABLE_AUTOLOAD_VARIABLE, "").strip():
        settings[AUTOLOAD_PATH] = Setting(not _parse_bool(value), _source(DISABLE_AUTOLOAD_VARIABLE))
    return settings


def warn_of_misspelt_variables(environ: Mapping[str, str], plugin_fields: Iterable[Field] = ()) -> None:
    """Log one line for each variable that looks like one of ours and is none."""
    known = {field.env for field in [*core_fields().values(), *plugin_fields]}
    known |= {PLUGINS_VARIABLE, DISABLE_AUTOLOAD_VARIABLE}
    prefixes = tuple(f"KSANA_{section.upper()}_" for section in core_sections())
    for variable in sorted(environ):
        if variable.startswith(prefixes) and variable not in known:
            matches = difflib.get_close_matches(variable, known, n=1, cutoff=_TYPO_RATIO)
            if matches:
                logger.warning("environment variable %s means nothing; did you mean %s?", variable, matches[0])


def _parse_bool(value: str) -> bool:
    if value.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"{_source(DISABLE_AUTOLOAD_VARIABLE)}: {value!r} is not valid: must be 1 or 0")
    return value.lower() in _TRUE


def _source(variable: str) -> str:
    return f"environment variable {variable}"
