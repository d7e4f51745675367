"""Showing the configuration as a YAML file that can be used as one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import SecretStr

from ksana.config.compose import ComposedConfig
from ksana.config.settings import PLUGIN_OPTIONS, Path, core_sections

_NO_WRAPPING = 10**6

_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s]*:\S*@)")
"""What a URL has before its host. The second form is for a password with a slash that nobody has escaped."""


def print_config(composed: ComposedConfig) -> str:
    """Render the merged configuration as YAML; what is not a default says in a comment where it comes from.

    Secrets are left out, and so are URLs with a user, a password or a token in them.
    """
    lines: list[str] = []
    config = composed.config
    values = config.model_dump(mode="json", fallback=str)
    for section in core_sections():
        lines.append(f"{section}:")
        lines += _lines(1, (section,), values[section], dict(getattr(config, section)), composed.sources)
    if config.plugin_options:
        lines.append(f"{PLUGIN_OPTIONS}:")
    for group, options in config.plugin_options.items():
        lines.append(f"  {group}:")
        lines += _lines(2, (PLUGIN_OPTIONS, group), values[PLUGIN_OPTIONS][group], options, composed.sources)
    return "\n".join(lines) + "\n"


def _lines(
    depth: int, path: Path, values: Mapping[str, Any], originals: Mapping[str, object], sources: Mapping[Path, str]
) -> Iterator[str]:
    """The lines of one section: ``values`` are what YAML can hold of ``originals``."""
    for name, value in values.items():
        source = sources.get((*path, name), "")
        if _holds_secret(originals[name]):
            # A placeholder would be taken for the secret itself by whoever uses this as a file.
            yield f"{'  ' * depth}# {name}: not shown ({source})"
            continue
        text = yaml.safe_dump([value], default_flow_style=True, width=_NO_WRAPPING, allow_unicode=True).strip()[1:-1]
        yield f"{'  ' * depth}{name}: {text}{f'  # {source}' if source else ''}"


def _holds_secret(value: object) -> bool:
    members = value if isinstance(value, tuple) else (value,)
    return any(
        bool(member.get_secret_value())
        if isinstance(member, SecretStr)
        else isinstance(member, str) and _CREDENTIALS.search(member) is not None
        for member in members
    )
