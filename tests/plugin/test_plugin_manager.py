"""Registering plugins: what is refused, and with which words."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace

import pytest

from ksana.errors import PluginLoadError
from ksana.markers import API_NUMBER, hookimpl, hookspec
from ksana.plugin.manager import KsanaPluginManager


def module_with(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def test_a_plugin_of_another_api_number_is_refused_with_both_numbers() -> None:
    manager = KsanaPluginManager()
    with pytest.raises(PluginLoadError, match=rf"ksana-old 3\.1.*API 99,.*API {API_NUMBER}:"):
        manager.register(module_with("old", ksana_api=99), "old", distribution="ksana-old 3.1")
    assert not manager.has_plugin("old")


def test_a_class_is_refused_where_an_instance_is_meant() -> None:
    class Plugin:
        @hookimpl
        def ksana_configure(self, config: object) -> None: ...

    manager = KsanaPluginManager()
    with pytest.raises(PluginLoadError, match=r"class Plugin: register an instance of it, Plugin\(\)"):
        manager.register(Plugin)
    manager.register(Plugin())


def test_a_misspelt_hook_is_refused_with_the_nearest_one() -> None:
    @hookimpl
    def ksana_preproces(draft: object) -> None: ...

    manager = KsanaPluginManager()
    manager.register(module_with("mine", ksana_preproces=ksana_preproces))
    with pytest.raises(PluginLoadError, match=r"'mine' implements ksana_preproces.*did you mean ksana_preprocess"):
        manager.check_pending()


def test_a_forgotten_hookimpl_mark_is_refused() -> None:
    def ksana_preprocess(draft: object) -> None: ...

    manager = KsanaPluginManager()
    manager.register(module_with("mine", ksana_preprocess=ksana_preprocess))
    with pytest.raises(PluginLoadError, match="'mine' defines ksana_preprocess without the @hookimpl mark"):
        manager.check_pending()


def test_a_parameter_that_the_hook_lacks_is_refused_in_one_line() -> None:
    @hookimpl
    def ksana_configure(cfg: object) -> None: ...

    with pytest.raises(PluginLoadError, match=r"plugin 'mine' .*cfg") as caught:
        KsanaPluginManager().register(module_with("mine", ksana_configure=ksana_configure))
    assert "\n" not in str(caught.value)
    assert "pluggy" not in str(caught.value)  # the place where it was noticed says nothing


def test_two_plugins_of_one_name_are_refused() -> None:
    manager = KsanaPluginManager()
    manager.register(module_with("a"), "same")
    with pytest.raises(PluginLoadError, match="'same'"):
        manager.register(module_with("b"), "same")


def test_a_plugin_brings_hooks_that_an_earlier_plugin_implements() -> None:
    @hookimpl
    def ksana_route_choice(candidates: list[str]) -> str:
        return candidates[-1]

    @hookspec(firstresult=True)
    def choice_spec(candidates: list[str]) -> None: ...

    choice_spec.__name__ = "ksana_route_choice"

    @hookimpl
    def ksana_addhooks(pluginmanager: KsanaPluginManager) -> None:
        pluginmanager.add_hookspecs(module_with("specs", ksana_route_choice=choice_spec))

    manager = KsanaPluginManager()
    manager.register(module_with("user", ksana_route_choice=ksana_route_choice))
    manager.register(module_with("router", ksana_addhooks=ksana_addhooks))
    manager.check_pending()
    assert manager.hook.ksana_route_choice(candidates=["a", "b"]) == "b"


def test_a_failing_addhooks_names_the_plugin() -> None:
    @hookimpl
    def ksana_addhooks(pluginmanager: object) -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(PluginLoadError, match="plugin 'bad' fails while it is registered: ZeroDivisionError: oops"):
        KsanaPluginManager().register(module_with("bad", ksana_addhooks=ksana_addhooks), "bad")


def test_tracing_shows_plugins_in_call_order_and_no_values(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @hookimpl
    def ksana_preprocess(draft: object) -> str:
        return "a secret answer"

    monkeypatch.setenv("KSANA_TRACE_PLUGINS", "1")
    caplog.set_level(logging.INFO, "ksana.plugin.trace")
    manager = KsanaPluginManager()
    manager.register(module_with("first", ksana_preprocess=ksana_preprocess))
    manager.register(module_with("second", ksana_preprocess=ksana_preprocess))
    manager.hook.ksana_preprocess(draft=SimpleNamespace(prompt="a secret prompt"), context=None)
    (line,) = [m for m in caplog.messages if m.startswith("ksana_preprocess")]
    assert "second, first" in line
    assert "returned [str, str]" in line
    assert "secret" not in line


def test_without_the_variable_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KSANA_TRACE_PLUGINS", "0")
    caplog.set_level(logging.DEBUG)
    manager = KsanaPluginManager()
    manager.hook.ksana_configure(config=None, pluginmanager=manager)
    assert caplog.messages == []
