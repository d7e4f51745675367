"""The shape of the code: floors, cycles, what an import costs, the rule of hooks."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ksana"

FLOORS = {
    "errors": 0,
    "markers": 0,
    "stdout": 0,
    "types": 1,
    "tracing": 2,
    "hookspecs": 2,
    "plugin": 2,
    "config": 2,
    "kv": 3,
    "text": 3,
    "kernels": 3,
    "scheduling": 4,
    "connectors": 4,
    "kv_events": 4,
    "drafters": 5,
    "models": 5,
    "worker": 5,
    "builtins": 5,
    "engine": 6,
    "server": 7,
    "telemetry": 7,
    "bench": 8,
    "cli": 8,
    "perf": 8,
    "testing": 8,
    "": 8,  # the package itself: it hands out names of every floor, so only the top may import it
}
"""Floor of each part of the core. A part may import its own floor and those below."""

LIGHT = [
    "types",
    "tracing",
    "hookspecs",
    "plugin",
    "config",
    "kv",
    "text",
    "scheduling",
    "connectors",
    "kv_events",
    "drafters",
]
WITH_LIBRARY = "ksana.kv_events.transports."
"""Modules of a light part that load the libraries of an extra, and what those load; nothing imports them unasked."""
HEAVY_LIBRARIES = {"torch", "aiohttp", "transformers"}

HOT_LOOPS = ["kv", "scheduling", "drafters", "kernels", "text", "models", "worker"]

MAX_LINES = 500
MAX_COLUMNS = 120


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    in_function: bool
    for_types: bool

    @property
    def climbs(self) -> bool:
        return FLOORS[part(self.imported)] > FLOORS[part(self.importer)]

    @property
    def plugs_in(self) -> bool:
        """A builtin plugin may import, inside a hook, the floor that it plugs into: an installed plugin does too."""
        return part(self.importer) == "builtins" and self.in_function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, path))


def imports_of(module: str, path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in imported_modules(node, module, path):
                yield Import(module, name, node.lineno, in_function, for_types)
        in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function, for_types or child in guarded)

    yield from visit(ast.parse(path.read_text()), in_function=False, for_types=False)


def imported_modules(node: ast.Import | ast.ImportFrom, module: str, path: Path) -> list[str]:
    """The modules of the core that an import statement loads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules()]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    if source not in modules():
        return []
    submodules = [name for alias in node.names if (name := f"{source}.{alias.name}") in modules()]
    return submodules if len(submodules) == len(node.names) else [source, *submodules]


def test_every_part_of_the_core_has_a_floor() -> None:
    assert {part(name) for name in modules()} == set(FLOORS)


def test_no_floor_imports_one_above_it() -> None:
    assert [str(found) for found in imports() if found.climbs and not found.for_types and not found.plugs_in] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {}
    for found in imports():
        if not found.for_types and not found.in_function:
            graph.setdefault(found.importer, set()).add(found.imported)
    assert cycle(graph) == []


def test_no_two_parts_lean_on_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for found in imports():
        if not found.for_types and not found.plugs_in and part(found.importer) != part(found.imported):
            graph.setdefault(part(found.importer), set()).add(part(found.imported))
    assert cycle(graph) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("name", ["", *LIGHT])
def test_a_light_part_loads_no_heavy_library(name: str) -> None:
    # Each in a process of its own: a library that one part has loaded would hide in the next.
    wanted = [module for module in modules() if part(module) == name and not module.startswith(WITH_LIBRARY)]
    program = (
        "import importlib, sys\n"
        f"for module in {wanted}: importlib.import_module(module)\n"
        f"print(sorted({HEAVY_LIBRARIES} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_hot_loops_call_no_hooks() -> None:
    calls = [
        f"{name}:{node.lineno}"
        for name, path in modules().items()
        if part(name) in HOT_LOOPS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "hook"
    ]
    assert calls == []


def test_no_file_is_too_long_to_read() -> None:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("csrc/*"), *ROOT.glob("plugins/*/src/**/*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_line_of_the_kernels_is_too_long_to_read() -> None:
    """What the linter holds for Python."""
    long = [
        f"{path.name}:{number}"
        for path in sorted(PACKAGE.rglob("csrc/*"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert long == []
