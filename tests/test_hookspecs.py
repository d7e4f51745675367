"""What the plugin API promises: each hook is called by something, and documented by an example that fits it."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from pathlib import Path

import pytest

from ksana import hookimpl, hookspec
from ksana.hookspecs import ALL_HOOKSPECS
from ksana.plugin.manager import KsanaPluginManager

PACKAGE = Path(__file__).parent.parent / "ksana"
HOOKS = {name: hook for module in ALL_HOOKSPECS for name, hook in vars(module).items() if name.startswith("ksana_")}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_called(name: str) -> None:
    sources = [file.read_text() for folder in ("plugin", "config", "engine", "server") for file in _files(folder)]
    called = re.compile(rf'hook\.{name}\b|"{name}"')
    assert any(called.search(source) for source in sources), f"nothing calls {name}"


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_in_the_docstring_fits_the_hook(name: str) -> None:
    plugin = types.ModuleType("example")
    vars(plugin).update(hookimpl=hookimpl, my_package=types.SimpleNamespace(hookspecs=_specs_of_a_reader()))
    exec(textwrap.dedent(_docstring(name).partition("Example::")[2]), vars(plugin))
    manager = KsanaPluginManager()
    manager.register(plugin)
    manager.check_pending()
    assert [impl.plugin for impl in getattr(manager.hook, name).get_hookimpls()] == [plugin]


@pytest.mark.parametrize("name", HOOKS)
def test_the_docstring_says_when_and_whose_answer_counts(name: str) -> None:
    words = " ".join(_docstring(name).split())
    firstresult = bool(HOOKS[name].ksana_spec["firstresult"])
    assert "When: " in words
    assert ("Firstresult." in words, "Not firstresult" in words) == (firstresult, not firstresult)


def _docstring(name: str) -> str:
    return inspect.getdoc(HOOKS[name]) or ""


def _files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def _specs_of_a_reader() -> types.ModuleType:
    """What the example of ``ksana_addhooks`` brings."""

    @hookspec
    def ksana_hook_of_a_reader() -> None:
        """Nothing."""

    module = types.ModuleType("hookspecs")
    vars(module)["ksana_hook_of_a_reader"] = ksana_hook_of_a_reader
    return module
