"""Reading a YAML configuration file, with errors that name the file and the place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ksana.errors import ConfigError


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A configuration file as it was read.

    Attributes:
        file: its path as the operator gave it.
        content: the mapping in it.
    """

    file: str
    content: dict[str, Any]


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader lets the last of two equal keys win without a word; this one refuses."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


def read_yaml(file: str) -> YamlDocument:
    """Read ``file``; an empty one sets nothing.

    Raises:
        ConfigError: it cannot be read, is not YAML, holds a key twice, or is not a mapping at the top.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {file} is not UTF-8 text") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader: it builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that is none, such as 2026-13-01
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} must hold a mapping such as 'server: {{port: 8080}}', not a {type(content).__name__}"
        )
    return YamlDocument(file, content)
