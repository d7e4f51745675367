"""Builds the native CPU kernels into the package; all else about the distribution is in pyproject.toml.

The kernels are a plain shared library that Python opens with ctypes. It knows nothing of Python, so that one build
serves every version of it. Whoever has no C++ compiler gets the package without it, and with it the slower kernels of
torch, unless ``KSANA_REQUIRE_NATIVE=1`` says that this is an error. ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` are heeded.

``python setup.py build_ext --inplace`` compiles what has changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

logger = logging.getLogger(__name__)  # setuptools prints what it is told

FOLDER = Path("ksana/kernels/cpu")
LIBRARY = FOLDER / "_native.so"
SOURCES = sorted(FOLDER.glob("csrc/*.cpp"))
HEADERS = sorted([*FOLDER.glob("csrc/*.h"), *FOLDER.glob("csrc/*.inl")])
OBJECTS = Path("build/native")

COMPILERS = ("g++", "c++", "clang++")
COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"),
)
LINK_FLAGS = ("-shared", "-pthread")


class NativeBuildError(Exception):
    """The library cannot be built here; the message is the reason."""


class BuildNative(build_ext):
    """Builds the library, or says why not."""

    def run(self) -> None:
        target = LIBRARY if self.inplace else Path(self.build_lib) / LIBRARY
        target.unlink(missing_ok=True)  # after a failure, none is better than one of other sources
        try:
            build_library(target)
        except NativeBuildError as error:
            if os.environ.get("KSANA_REQUIRE_NATIVE", "") not in ("", "0"):
                sys.exit(f"error: the native CPU kernels cannot be built: {error}")
            logger.warning(
                "warning: the native CPU kernels cannot be built: %s. "
                "Ksana will use torch instead, which is slower; install a C++ compiler and reinstall Ksana",
                error,
            )

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(LIBRARY.suffix))  # no module, so no tag of Python's ABI


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def build_library(target: Path) -> None:
    """Compile all sources whose objects are out of date, several at once, and link them.

    Raises:
        NativeBuildError: there is no compiler, or it reports an error.
    """
    if not sys.platform.startswith("linux"):
        raise NativeBuildError(f"they are for Linux, this is {sys.platform}")
    # Files that are edited while the compiler runs count as newer than its results.
    started = time.time_ns()
    compiler = [*find_compiler(), *COMPILE_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    # Other flags, other objects.
    key = hashlib.sha256(repr((compiler, sysconfig.get_platform())).encode()).hexdigest()[:12]
    folder = OBJECTS / key
    folder.mkdir(parents=True, exist_ok=True)
    objects = {source: folder / f"{source.stem}.o" for source in SOURCES}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stale = [item for item in objects.items() if out_of_date(*item)]
        for _ in pool.map(lambda item: run_compiler([*compiler, "-c", str(item[0])], item[1], started), stale):
            pass
    link = [*compiler, *LINK_FLAGS, *map(str, objects.values()), *shlex.split(os.environ.get("LDFLAGS", ""))]
    target.parent.mkdir(parents=True, exist_ok=True)
    run_compiler(link, target, started)


def find_compiler() -> list[str]:
    """``CXX``, or the first compiler that is installed."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise NativeBuildError(f"the compiler of CXX={wanted[0]} does not exist")
        return wanted
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeBuildError(f"there is no C++ compiler (looked for {', '.join(COMPILERS)})")


def out_of_date(source: Path, compiled: Path) -> bool:
    """True if the source, or a header, which may be included anywhere, has changed since it was compiled."""
    if not compiled.exists():
        return True
    return compiled.stat().st_mtime_ns <= max(path.stat().st_mtime_ns for path in [source, *HEADERS])


def run_compiler(command: Sequence[str], output: Path, started: int) -> None:
    """Write ``output`` at one stroke, since a process may have the old file open, and date it ``started``."""
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    command = [*command, "-o", str(partial)]
    logger.info(shlex.join(command))
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(result.stderr)
    if result.returncode:
        partial.unlink(missing_ok=True)
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        said = f": {errors[0].strip()}" if errors else ""
        raise NativeBuildError(f"{command[0]} ended with exit code {result.returncode}{said}")
    os.utime(partial, ns=(started, started))
    partial.replace(output)


setup(
    ext_modules=[
        Extension("ksana.kernels.cpu._native", sources=[*map(str, SOURCES)], depends=[*map(str, HEADERS)]),
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
