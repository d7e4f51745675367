"""Values that must not be shown, and settings of several values."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import SecretStr

from ksana.cli.flags import CommandLine, full_parser, settings_from_flags
from ksana.config.compose import ComposedConfig, compose_config
from ksana.config.options import OptionRegistry
from ksana.config.show import print_config
from ksana.config.yaml_file import YamlDocument
from ksana.errors import ConfigError

COMMAND = CommandLine("test", "", "", "")


def options_of_a_plugin() -> OptionRegistry:
    options = OptionRegistry().view_for("directory")
    options.add("directory", "password", SecretStr, default="", help="to log in")
    return options


def compose(
    *flags: str, content: dict[str, Any] | None = None, environ: dict[str, str] | None = None
) -> ComposedConfig:
    options = options_of_a_plugin()
    settings = settings_from_flags(full_parser(options, COMMAND), flags, options)
    document = None if content is None else YamlDocument("c.yaml", content)
    return compose_config(document, environ or {}, settings, options)


def keys(composed: ComposedConfig) -> list[str]:
    return [key.get_secret_value() for key in composed.config.server.api_keys]


def test_a_flag_for_several_values_is_repeated_and_a_variable_divided() -> None:
    assert keys(compose("--api-key", "a", "--api-key", "b")) == ["a", "b"]
    assert keys(compose(environ={"KSANA_API_KEY": "a, b"})) == ["a", "b"]
    assert keys(compose(content={"server": {"api_keys": ["a", "b"]}})) == ["a", "b"]
    assert compose(
        "--cors-origin", "*", environ={"KSANA_SERVER_CORS_ORIGINS": "http://x"}
    ).config.server.cors_origins == ("*",)


def test_the_short_variable_counts_less_than_the_regular_one() -> None:
    assert keys(compose(environ={"KSANA_API_KEY": "short", "KSANA_SERVER_API_KEYS": "long"})) == ["long"]


def test_a_secret_is_shown_nowhere() -> None:
    composed = compose(
        "--directory-password",
        "hush-1",
        content={"server": {"api_keys": ["hush-2"]}},
        environ={"KSANA_API_KEY": "hush-3"},
    )
    password = composed.config.plugin_options["directory"]["password"]
    assert isinstance(password, SecretStr)
    assert password.get_secret_value() == "hush-1"
    shown = print_config(composed)
    assert "# api_keys: not shown (environment variable KSANA_API_KEY)" in shown
    assert "# password: not shown (--directory-password)" in shown
    for text in (shown, repr(composed), str(composed.config), composed.config.model_dump_json()):
        assert "hush" not in text


def test_what_is_shown_is_a_file_that_sets_no_key() -> None:
    shown = print_config(compose(environ={"KSANA_API_KEY": "hush"}))
    assert "api_keys: []" in print_config(compose())
    assert "*" not in shown


@pytest.mark.parametrize(
    "url", ["nats://me:hush@host:4222", "nats://hush@host", "nats://me:hu/sh@host", "nats://a:1,nats://me:hush@b:1"]
)
def test_a_url_with_credentials_is_not_shown(url: str) -> None:
    shown = print_config(compose("--kv-events-endpoint", url, "--otlp-endpoint", url))
    assert "  # endpoint: not shown (--kv-events-endpoint)" in shown
    assert "  # otlp_endpoint: not shown (--otlp-endpoint)" in shown
    assert "hush" not in shown
    assert "hu/sh" not in shown


@pytest.mark.parametrize("url", ["nats://host:4222", "http://host/a@b", "tcp://[::1]:5557"])
def test_a_url_without_credentials_is_shown(url: str) -> None:
    assert url in print_config(compose("--kv-events-endpoint", url))


def test_the_error_about_a_secret_does_not_show_it() -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys: what it says is not valid: must be a valid string"):
        compose(content={"server": {"api_keys": [4711]}})
    with pytest.raises(ConfigError) as caught:
        compose(content={"plugin_options": {"directory": {"password": 4711}}})
    assert "4711" not in str(caught.value)


def test_no_key_is_seen_when_the_command_fails() -> None:
    arguments = ["--model", "no/such/model", "--log-level", "debug", "--api-key-file", "/no/such/file"]
    environment = {**os.environ, "KSANA_API_KEY": "hush-hush", "KSANA_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "ksana.cli.serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 2
    assert "cannot read --api-key-file /no/such/file" in result.stderr
    assert "hush" not in result.stderr + result.stdout
