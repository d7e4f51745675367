"""Build the distributions and try each in an environment of its own, as somebody who installs them would.

Run it as ``make package-check``. It ends with exit code 1 and the reason at the first thing that is wrong.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BUILTINS = tuple(sorted(file.stem for file in (ROOT / "ksana" / "builtins").glob("[!_]*.py")))

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
extras = (".testing", ".otlp", ".kv_events.transports.")
names = [name for name in names if not any(extra in name for extra in extras)]
names = [name for name in names if not name.endswith("._native")]  # it ends in .so, but is no module
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of {package.__name__} import")
"""

LIST_WITHOUT_TORCH = """
import sys
from ksana.cli.serve import main
code = main(["plugins"])
heavy = {"torch", "transformers", "aiohttp"} & set(sys.modules)
sys.exit(code or (f"listing the plugins loads {sorted(heavy)}" if heavy else 0))
"""

NATIVE_KERNELS = """
import sys
from ksana.kernels.cpu.library import PACKAGED_LIBRARY, load_library
sys.exit(0 if load_library() else f"{PACKAGED_LIBRARY} does not work")
"""


@dataclass(frozen=True)
class Distribution:
    """A package of this repository.

    Attributes:
        folder: where its pyproject.toml lies.
        package: the folder of the import package.
        plugin: name of the plugin that it installs.
        built: files of the package that the build makes; a distribution that has some is for one platform.
        sources: folders of the package that only the source distribution has.
    """

    name: str
    folder: Path
    package: Path
    plugin: str = ""
    built: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()


DISTRIBUTIONS = (
    Distribution(
        "ksana",
        ROOT,
        ROOT / "ksana",
        built=frozenset({"ksana/kernels/cpu/_native.so"}),
        sources=("ksana/kernels/cpu/csrc",),
    ),
    Distribution(
        "ksana-openai-api",
        ROOT / "plugins/openai_api",
        ROOT / "plugins/openai_api/src/ksana_openai_api",
        plugin="openai_api",
    ),
    Distribution(
        "ksana-mooncake",
        ROOT / "plugins/mooncake",
        ROOT / "plugins/mooncake/src/ksana_mooncake",
        plugin="mooncake",
    ),
)


def main() -> int:
    """Build and check; return the exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ksana-packaging-") as scratch:
        wheels: list[Path] = []
        for distribution in DISTRIBUTIONS:
            wheel = build(distribution, Path(scratch) / "dist" / distribution.name)
            check_contents(distribution, wheel)
            # A plugin is installed beside the core that was built here, never beside one from an index.
            wheels = [*wheels[:1], wheel]
            check_installed(distribution, wheels, Path(scratch) / distribution.name)
    print(f"==> packaging is in order ({time.monotonic() - started:.0f} s)")
    return 0


def build(distribution: Distribution, target: Path) -> Path:
    """Build the source distribution, and from that the wheel, whose path is returned."""
    step(f"building {distribution.name}")
    run(sys.executable, "-m", "build", "--outdir", str(target), str(distribution.folder), quiet=True)
    (wheel,) = target.glob("*.whl")
    # Neither is for one version of Python: the kernels are no extension module.
    wanted = "py3-none-linux_*" if distribution.built else "py3-none-any"
    if not wheel.match(f"*-{wanted}.whl"):
        fail(f"{wheel.name} should be tagged {wanted}")
    return wheel


def check_contents(distribution: Distribution, wheel: Path) -> None:
    """Refuse a wheel that lacks a source file, what is built, the type marker or the licence, or has anything else."""
    package = distribution.package
    files_here = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    names = {path.relative_to(package.parent).as_posix() for path in files_here}
    expected = {name for name in names if not name.startswith(distribution.sources)} | distribution.built
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    metadata = {name for name in files if name.partition("/")[0].endswith(".dist-info")}
    if missing := sorted(expected - files):
        fail(f"{wheel.name} lacks {', '.join(missing)}")
    if surplus := sorted(files - metadata - expected):
        fail(f"{wheel.name} holds files that are not of {package.name}: {', '.join(surplus)}")
    if f"{package.name}/py.typed" not in files:
        fail(f"{wheel.name} has no py.typed")
    if not any(name.endswith("/LICENSE") for name in metadata):
        fail(f"{wheel.name} has no LICENSE")
    print(f"{wheel.name}: {len(expected)} files of {package.name}, and nothing else")


def check_installed(distribution: Distribution, wheels: list[Path], folder: Path) -> None:
    """Install wheels into a new environment and try the command and the imports there."""
    step(f"installing {' and '.join(wheel.name for wheel in wheels)} into a clean environment")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--no-compile", "-c", constraints, *map(str, wheels), quiet=True)
    run(python, "-m", "pip", "check", quiet=True)
    version = run(str(folder / "bin" / "ksana-serve"), "--version")
    if wheels[0].name.split("-")[1] not in version:
        fail(f"ksana-serve --version says {version!r}, but installed is {wheels[0].name}")
    check_listing(run(str(folder / "bin" / "ksana-serve"), "plugins"), distribution)
    run(python, "-c", LIST_WITHOUT_TORCH, quiet=True)
    run(python, "-c", NATIVE_KERNELS, quiet=True)
    run(python, "-c", IMPORT_EVERYTHING, distribution.package.name)


def check_listing(listing: str, distribution: Distribution) -> None:
    """Refuse a list of plugins that has more or fewer than what is installed."""
    names = [line.split()[0] for line in listing.splitlines()[1:]]
    expected = [*BUILTINS, *([distribution.plugin] if distribution.plugin else [])]
    if sorted(names) != sorted(expected):
        fail(f"ksana-serve plugins lists {', '.join(names)}, but installed are {', '.join(expected)}")


def step(text: str) -> None:
    """Say what comes next."""
    print(f"==> {text}", flush=True)


def run(*command: str, quiet: bool = False) -> str:
    """Run a command outside the repository, whose sources must not help, and return what it prints."""
    shown = shlex.join([Path(command[0]).name, *("..." if "\n" in word else word for word in command[1:])])
    print(f"$ {shown}", flush=True)
    result = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "KSANA_REQUIRE_NATIVE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        fail(f"exit code {result.returncode} from: {shown}\n{result.stdout}")
    if not quiet:
        print(result.stdout, end="", flush=True)
    return result.stdout


def fail(reason: str) -> None:
    """End with exit code 1."""
    sys.exit(f"error: {reason}")


if __name__ == "__main__":
    sys.exit(main())
