"""Finding plugins through real package metadata, their order, and keeping them out."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ksana.errors import PluginLoadError, UsageError
from ksana.plugin.discovery import list_plugins
from ksana.plugin.model_dir import find_model_dir_plugin
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.types.config import ModelOptions, PluginConfig

GOOD = "from ksana import hookimpl\n\n@hookimpl\ndef ksana_kernel_backends(register):\n    register(__name__)\n"


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.endswith("_module") and name not in before]:
        del sys.modules[name]


def specs(*plugins: str, autoload: bool = True) -> PluginSpecs:
    return PluginSpecs.from_config(PluginConfig(plugins=plugins, autoload=autoload))


def call_order(plugin_specs: PluginSpecs) -> list[str]:
    seen: list[object] = []
    create_plugin_manager(plugin_specs).hook.ksana_kernel_backends(register=seen.append)
    return [name.removesuffix("_module") for name in seen if isinstance(name, str) and name.endswith("_module")]


def test_plugins_are_called_model_to_builtin_and_by_name(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("zebra", GOOD))
    write_package("apple", GOOD)
    write_package("mango", GOOD)
    assert call_order(specs()) == ["zebra", "mango", "apple"]
    assert call_order(specs("apple")) == ["apple", "zebra", "mango"], "a named plugin comes after the automatic ones"
    names = [name for name, _ in create_plugin_manager(specs()).list_name_plugin()]
    assert names.index("native_api") < names.index("apple"), "builtins are registered first and so called last"


def test_specs_survive_pickling_and_rebuild_the_same_manager(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("apple", GOOD))
    original = specs("no:native_api", "apple_module")
    copy = pickle.loads(pickle.dumps(original))
    names = [name for name, _ in create_plugin_manager(copy).list_name_plugin()]
    assert copy == original
    assert names == [name for name, _ in create_plugin_manager(original).list_name_plugin()]
    assert "native_api" not in names


def test_a_broken_plugin_stops_with_package_cause_and_way_out(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("cracked", "x = 1\nimport module_of_nobody\n", version="2.5"))
    with pytest.raises(PluginLoadError) as caught:
        create_plugin_manager(specs())
    message = str(caught.value)
    assert "ksana-cracked 2.5" in message
    assert "No module named 'module_of_nobody'" in message
    assert "cracked_module.py, line 2" in message
    assert "-p no:cracked" in message
    create_plugin_manager(specs("no:cracked"))
    create_plugin_manager(specs(autoload=False))


def test_a_plugin_that_exits_on_import_does_not_end_the_process(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("quitter", "raise SystemExit(0)\n"))
    with pytest.raises(PluginLoadError, match="quitter"):
        create_plugin_manager(specs())


def test_an_entry_point_that_names_a_class_is_refused(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("classy", "class P: ...\n", value="classy_module:P"))
    with pytest.raises(PluginLoadError, match=r"ksana-classy 1\.0.*is the class P"):
        create_plugin_manager(specs())


def test_autoload_off_loads_only_what_is_named(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("apple", GOOD))
    write_package("mango", GOOD)
    assert call_order(specs(autoload=False)) == []
    assert call_order(specs("mango", autoload=False)) == ["mango"]


def test_naming_the_module_of_an_installed_plugin_loads_it_once(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("apple", GOOD))
    assert call_order(specs("apple_module")) == ["apple"]


def test_the_last_word_about_a_name_counts() -> None:
    assert specs("no:mine", "mine").modules == ("mine",)
    assert specs("mine", "no:mine").disabled == {"mine"}


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        (("no:natve_api",), "did you mean native_api.*known: cpu_backend"),
        (("no:cpu_backend",), "cannot be disabled"),
        (("module_of_nobody",), "neither an installed plugin nor a module"),
    ],
)
def test_bad_names_are_explained(plugins: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        create_plugin_manager(specs(*plugins))


def test_a_named_module_with_a_missing_import_blames_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_module.py").write_text("import module_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginLoadError, match=r"'needy_module' does not import.*module_of_nobody"):
        create_plugin_manager(specs("needy_module"))


def test_two_packages_with_one_plugin_name_are_named(
    write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package("twin", GOOD, distribution="ksana-left"))
    write_package("twin", GOOD, distribution="ksana-right", value="twin_module:ksana_kernel_backends")
    with pytest.raises(PluginLoadError, match=r"ksana-left 1\.0 and ksana-right 1\.0"):
        create_plugin_manager(specs())
    statuses = [row.status for row in list_plugins() if row.name == "twin"]
    assert statuses == ["installed", "name is taken"]


def test_listing_imports_nothing(write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_package("cracked", "raise RuntimeError\n"))
    rows = {row.name: row for row in list_plugins(("other",), frozenset({"native_api"}), autoload=False)}
    assert (rows["cracked"].distribution, rows["cracked"].version) == ("ksana-cracked", "1.0")
    assert rows["cracked"].status == "not loaded"
    assert rows["native_api"].status == "disabled"
    assert rows["cpu_backend"].status == "essential builtin"
    assert rows["other"].status == "named"
    assert "cracked_module" not in sys.modules


def test_a_child_process_gets_the_model_folders_plugin_too(tmp_path: Path) -> None:
    (tmp_path / "ksana_plugin.py").write_text("class KsanaPlugin: ...\n")
    found = find_model_dir_plugin(tmp_path, ModelOptions(trust_remote_code=True))
    copy = pickle.loads(pickle.dumps(PluginSpecs.from_config(PluginConfig(autoload=False), found)))
    names = [name for name, _ in create_plugin_manager(copy).list_name_plugin()]
    assert names[-1] == "model-folder", "registered last, called first"
