"""Values on their way into the configuration: where they belong, and where they come from."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr

from ksana.types.config import ConfigPart, KsanaConfig

Path = tuple[str, ...]
"""Place of a value: ``("server", "port")``, or ``("plugin_options", "router", "policy")``."""

PLUGIN_OPTIONS = "plugin_options"
PLUGINS_PATH = ("plugins", "plugins")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as its source gave it, not yet validated.

    Attributes:
        value: a string from the environment or the command line, any YAML value from a file.
        source: for people: ``--port``, ``environment variable KSANA_SERVER_PORT``, ``serve.yaml: server.port``.
    """

    value: Any
    source: str


Settings = dict[Path, Setting]


@dataclass(frozen=True, slots=True)
class Field:
    """One field that can be set: of the core, or added by a plugin.

    Attributes:
        path: its place in the configuration.
        type: what pydantic validates against.
        flag: command-line flag.
        env: environment variable.
    """

    path: Path
    type: Any
    default: Any
    help: str
    flag: str
    env: str

    @property
    def group(self) -> str:
        """Section of a core field, or group of a plugin's option."""
        return self.path[-2]

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid values if they are a short list, else empty."""
        return tuple(map(str, get_args(self.type))) if get_origin(self.type) is Literal else ()

    @property
    def is_list(self) -> bool:
        """True if it holds several values, for which its flag may be repeated."""
        return get_origin(self.type) is tuple

    @property
    def is_secret(self) -> bool:
        """True if its value must not be shown."""
        return SecretStr in (self.type, *get_args(self.type))

    @property
    def accepts_bool(self) -> bool:
        """True if ``true`` and ``false`` are among its values."""
        members = get_args(self.type) if get_origin(self.type) in (Union, types.UnionType) else (self.type,)
        return any(member in (bool, Any, object) for member in members)


_FLAGS = {
    ("scheduler", "policy"): "--scheduling-policy",
    ("speculation", "method"): "--speculative",
    ("speculation", "max_requests"): "--speculative-max-requests",
    ("speculation", "step_overhead"): "--speculative-step-overhead",
    ("speculation", "trie_nodes"): "--speculative-trie-nodes",
    ("cache", "memory_fraction"): "--cache-memory-fraction",
    ("cache", "max_bytes"): "--cache-max-bytes",
    ("cache", "host_max_bytes"): "--host-memory-max-bytes",
    ("kv_transfer", "connectors"): "--kv-connector",
    ("kv_transfer", "load_failure_policy"): "--kv-load-failure-policy",
    ("kv_transfer", "load_timeout_s"): "--kv-load-timeout-s",
    ("kv_transfer", "free_timeout_s"): "--kv-free-timeout-s",
    ("kv_transfer", "disk_path"): "--kv-disk-path",
    ("kv_transfer", "disk_max_bytes"): "--kv-disk-max-bytes",
    ("kv_events", "publisher"): "--kv-events",
    ("kv_events", "endpoint"): "--kv-events-endpoint",
    ("kv_events", "replay_endpoint"): "--kv-events-replay-endpoint",
    ("kv_events", "topic"): "--kv-events-topic",
    ("kv_events", "buffer_steps"): "--kv-events-buffer-steps",
    ("kv_events", "hwm"): "--kv-events-hwm",
    ("server", "api_keys"): "--api-key",
    ("server", "cors_origins"): "--cors-origin",
    ("telemetry", "otlp_attributes"): "--otlp-attribute",
    ("plugins", "autoload"): "--plugin-autoload",
    PLUGINS_PATH: "-p",
}
"""Flags of fields whose bare name says too little outside its section, or names several values of which it is one."""


@cache
def core_sections() -> dict[str, type[ConfigPart]]:
    """The parts of :class:`KsanaConfig` by name."""
    found: dict[str, type[ConfigPart]] = {}
    for name, info in KsanaConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, ConfigPart):
            found[name] = info.annotation
    return found


@cache
def core_fields() -> dict[Path, Field]:
    """Every field of the core, in the order of declaration."""
    found: dict[Path, Field] = {}
    for section, part in core_sections().items():
        for name, info in part.model_fields.items():
            path = (section, name)
            flag = _FLAGS.get(path, flag_name(name))
            help_text = info.description or ""
            found[path] = Field(path, info.annotation, info.default, help_text, flag, env_name(section, name))
    return found


def flag_name(*words: str) -> str:
    """``("router", "max_wait")`` -> ``--router-max-wait``."""
    return "--" + "-".join(words).replace("_", "-")


def env_name(*words: str) -> str:
    """``("server", "port")`` -> ``KSANA_SERVER_PORT``."""
    return "_".join(("ksana", *words)).upper()
