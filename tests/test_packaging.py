"""What the distributions say about themselves, against what their code does."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent

OWNERS = metadata.packages_distributions()

DISTRIBUTIONS = [(ROOT, "ksana"), (ROOT / "plugins/openai_api", "src"), (ROOT / "plugins/mooncake", "src")]

NOT_IMPORTED = {"protobuf", "sentencepiece"}
"""Dependencies that work behind transformers."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def declared(folder: Path, extra: str = "") -> set[str]:
    table = project(folder)
    needs = table["optional-dependencies"][extra] if extra else table["dependencies"]
    return {normalized(re.split(r"[^\w.-]", need)[0]) for need in needs}


def optional(folder: Path) -> set[str]:
    """What the code does without if it is not there."""
    extras = {"events", "non-cuda", "otlp", "plot"} & project(folder).get("optional-dependencies", {}).keys()
    return {need for extra in extras for need in declared(folder, extra)}


def imported(sources: Path, *, kits: bool) -> set[str]:
    """The distributions, or the modules of none, that the code imports at any place: the kits' or all other code."""
    names: set[str] = set()
    for path in sources.rglob("*.py"):
        if (path.parent.name == "testing") != kits:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    own = {path.name for path in [sources, *sources.iterdir()]} | set(sys.stdlib_module_names)
    return {normalized(distribution_of(name)) for name in names if name.partition(".")[0] not in own}


def distribution_of(module: str) -> str:
    """The distribution that brings a module; several may share the package at its top."""
    top = module.partition(".")[0]
    owners = set(OWNERS.get(top, [top]))
    path = module.replace(".", "/")
    for owner in owners if len(owners) > 1 else ():
        if any(str(file) in (f"{path}.py", f"{path}/__init__.py") for file in metadata.files(owner) or ()):
            return owner
    return min(owners)


@pytest.mark.parametrize(("folder", "sources"), DISTRIBUTIONS)
def test_dependencies_are_those_that_the_code_imports(folder: Path, sources: str) -> None:
    assert imported(folder / sources, kits=False) == (declared(folder) | optional(folder)) - NOT_IMPORTED


def test_the_kits_for_plugin_authors_need_no_more_than_their_extra() -> None:
    assert imported(ROOT / "ksana", kits=True) <= declared(ROOT) | declared(ROOT, "testing")


def test_every_dependency_is_pinned_for_development() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normalized(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    needed = {need for folder, _ in DISTRIBUTIONS for need in declared(folder)}
    extras = declared(ROOT, "testing") | declared(ROOT, "clients") | declared(ROOT, "dev") | optional(ROOT)
    assert (needed | extras) - {"ksana"} <= pinned
