"""Precedence of the sources, plugins' options, and showing the result."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ksana.config.compose import ComposedConfig, compose_config, compose_plugin_config
from ksana.config.environment import warn_of_misspelt_variables
from ksana.config.options import OptionRegistry, collect_options
from ksana.config.settings import Setting, Settings
from ksana.config.show import print_config
from ksana.config.yaml_file import YamlDocument, read_yaml
from ksana.errors import ConfigError, PluginLoadError
from ksana.markers import hookimpl
from ksana.plugin.manager import KsanaPluginManager

PORT = ("server", "port")


def compose(
    content: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: Settings | None = None,
    options: OptionRegistry | None = None,
) -> ComposedConfig:
    document = None if content is None else YamlDocument("c.yaml", content)
    return compose_config(document, environ or {}, flags or {}, options or OptionRegistry())


def registry() -> OptionRegistry:
    options = OptionRegistry()
    options.view_for("router").add("router", "policy", Literal["rr", "kv"], default="rr", help="how")
    options.view_for("router").add("router", "depth", int, default=2, help="how deep")
    return options


def test_later_sources_win() -> None:
    content = {"server": {"port": 1, "host": "file"}}
    environ = {"KSANA_SERVER_PORT": "2", "KSANA_SERVER_HOST": "env"}
    composed = compose(content, environ, {PORT: Setting("3", "--port")})
    assert (composed.config.server.port, composed.config.server.host) == (3, "env")
    assert composed.sources == {PORT: "--port", ("server", "host"): "environment variable KSANA_SERVER_HOST"}


def test_variables_of_the_original_engine_count_less_than_ours() -> None:
    environ = {"KLLM_LOG_LEVEL": "DEBUG", "KLLM_MAX_DEVICE_BLOCKS": "99"}
    config = compose(environ=environ).config
    assert (config.server.log_level, config.cache.num_blocks) == ("debug", 99)
    assert compose(environ={**environ, "KSANA_SERVER_LOG_LEVEL": "error"}).config.server.log_level == "error"


def test_an_empty_variable_is_unset() -> None:
    assert compose(environ={"KSANA_SERVER_PORT": " ", "KSANA_PLUGINS": ""}).sources == {}


def test_kubernetes_service_variables_are_recognised() -> None:
    with pytest.raises(ConfigError, match=r"KSANA_SERVER_PORT.*Kubernetes"):
        compose(environ={"KSANA_SERVER_PORT": "tcp://10.0.0.1:8080"})


def test_misspelt_variables_are_reported_and_foreign_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    foreign = {"KSANA_SERVER_SERVICE_HOST": "x", "KSANA_SERVER_PORT_8080_TCP": "y", "KSANA_TRACE_PLUGINS": "1"}
    warn_of_misspelt_variables({**foreign, "KSANA_SERVER_PROT": "1", "KSANA_CACHE_BLOCK_SIZE": "16"})
    (line,) = caplog.messages
    assert "KSANA_SERVER_PROT means nothing; did you mean KSANA_SERVER_PORT?" in line


def test_lists_of_plugins_add_up() -> None:
    document = YamlDocument("c.yaml", {"plugins": {"plugins": ["a"]}})
    flags: Settings = {("plugins", "plugins"): Setting(("c", "no:a"), "-p")}
    config = compose_plugin_config(document, {"KSANA_PLUGINS": "b, b2"}, flags)
    assert config.plugins == ("a", "b", "b2", "c", "no:a")


@pytest.mark.parametrize(("value", "autoload"), [("1", False), ("true", False), ("0", True), ("", True)])
def test_autoload_is_switched_off_by_environment(value: str, autoload: bool) -> None:
    assert compose_plugin_config(None, {"KSANA_DISABLE_PLUGIN_AUTOLOAD": value}, {}).autoload is autoload


def test_an_unclear_autoload_is_refused() -> None:
    with pytest.raises(ConfigError, match="KSANA_DISABLE_PLUGIN_AUTOLOAD: 'maybe' is not valid"):
        compose(environ={"KSANA_DISABLE_PLUGIN_AUTOLOAD": "maybe"})


def test_several_bad_values_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"KSANA_SERVER_PORT: 'x'.*; .*KSANA_SERVER_LOG_LEVEL: 'y'"):
        compose(environ={"KSANA_SERVER_PORT": "x", "KSANA_SERVER_LOG_LEVEL": "y"})


def test_plugin_options_come_from_every_source() -> None:
    content = {"plugin_options": {"router": {"depth": 5}}}
    composed = compose(content, {"KSANA_ROUTER_POLICY": "kv"}, {}, registry())
    assert composed.config.plugin_options == {"router": {"policy": "kv", "depth": 5}}
    path = ("plugin_options", "router", "depth")
    flags: Settings = {path: Setting("7", "--router-depth")}
    assert compose(content, {}, flags, registry()).config.plugin_options["router"] == {"policy": "rr", "depth": 7}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"router": {"polcy": "kv"}}, "did you mean plugin_options.router.policy"),
        ({"router": {"policy": "best"}}, "c.yaml: plugin_options.router.policy: 'best' is not valid: must be 'rr' or"),
        ({"router": {"depth": True}}, "True is not valid"),
    ],
)
def test_bad_plugin_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose({"plugin_options": options}, options=registry())


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        ("router", "policy", "'other' adds the option --router-policy, which 'router' already has"),
        ("max", "num_seqs", "--max-num-seqs, which 'the core' already has"),
        ("server", "extra", "a section of the core"),
        ("Router", "x", "no name for an option"),
    ],
)
def test_colliding_options_name_both_owners(group: str, name: str, words: str) -> None:
    with pytest.raises(PluginLoadError, match=words):
        registry().view_for("other").add(group, name, str, default="", help="")


def test_an_invalid_default_is_the_plugins_error() -> None:
    with pytest.raises(PluginLoadError, match="'mine': the default of --mine-n is invalid"):
        OptionRegistry().view_for("mine").add("mine", "n", int, default="many", help="")


def test_collisions_between_real_plugins_name_both() -> None:
    def plugin(name: str) -> ModuleType:
        @hookimpl
        def ksana_addoption(options: OptionRegistry) -> None:
            options.add("shared", "thing", str, default="", help="")

        module = ModuleType(name)
        module.ksana_addoption = ksana_addoption  # type: ignore[attr-defined]
        return module

    manager = KsanaPluginManager()
    manager.register(plugin("one"))
    manager.register(plugin("two"))
    with pytest.raises(PluginLoadError, match="'two' adds the option --shared-thing, which 'one' already has"):
        collect_options(manager)


def test_the_shown_configuration_says_where_values_come_from() -> None:
    shown = print_config(compose({"server": {"port": 9}}, {"KSANA_ROUTER_POLICY": "kv"}, {}, registry()))
    assert "  port: 9  # c.yaml: server.port\n" in shown
    assert "    policy: kv  # environment variable KSANA_ROUTER_POLICY\n" in shown
    assert "  host: 127.0.0.1\n" in shown


@given(model=st.text(st.characters(codec="utf-8")), port=st.integers(0, 65535), plugins=st.lists(st.text("ab:# '\"")))
def test_the_shown_configuration_is_a_configuration_file(
    tmp_path_factory: pytest.TempPathFactory, model: str, port: int, plugins: list[str]
) -> None:
    content = {"model": {"model": model}, "server": {"port": port}, "plugins": {"plugins": plugins}}
    first = compose(content)
    file = tmp_path_factory.mktemp("shown") / "shown.yaml"
    file.write_text(print_config(first), encoding="utf-8")
    second = compose_config(read_yaml(str(file)), {}, {}, OptionRegistry())
    assert second.config.model_copy(update={"config_file": "c.yaml"}) == first.config


def test_every_flag_and_variable_is_unique(tmp_path: Path) -> None:
    from ksana.config.settings import core_fields

    fields = list(core_fields().values())
    assert len({field.flag for field in fields}) == len({field.env for field in fields}) == len(fields)
