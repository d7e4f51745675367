"""Showing the configuration as a YAML file that can be used as one."""

from __future__ import annotations

from typing import Any

import yaml

from ksana.config.compose import ComposedConfig
from ksana.config.settings import PLUGIN_OPTIONS, Path, core_sections

_NO_WRAPPING = 10**6


def print_config(composed: ComposedConfig) -> str:
    """Render the merged configuration as YAML; what is not a default says in a comment where it comes from."""
    lines: list[str] = []
    values = composed.config.model_dump(mode="json", fallback=str)
    for section in core_sections():
        lines.append(f"{section}:")
        lines += [_line(1, (section, name), value, composed.sources) for name, value in values[section].items()]
    if composed.config.plugin_options:
        lines.append(f"{PLUGIN_OPTIONS}:")
    for group, options in values[PLUGIN_OPTIONS].items():
        lines.append(f"  {group}:")
        lines += [_line(2, (PLUGIN_OPTIONS, group, name), value, composed.sources) for name, value in options.items()]
    return "\n".join(lines) + "\n"


def _line(depth: int, path: Path, value: Any, sources: dict[Path, str]) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, width=_NO_WRAPPING, allow_unicode=True).strip()[1:-1]
    comment = f"  # {sources[path]}" if path in sources else ""
    return f"{'  ' * depth}{path[-1]}: {text}{comment}"
