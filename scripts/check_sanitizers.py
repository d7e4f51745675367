"""Run the tests of the kernels with sanitizers, which see what a test that passes by luck does not.

The native library is compiled twice, to watch addresses and undefined behaviour, and to watch threads, and
``tests/kernels`` run with each; a driver of the thread pool runs with the latter. Each is first shown faults that it
must report: a run that could find nothing would prove nothing.

Run it as ``make sanitize``; ``ARGS`` are for pytest. It needs GCC and its sanitizers' libraries. The exit code is 1 if
anything is found.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "ksana/kernels/cpu/csrc"
DRIVER = ROOT / "tests/kernels/thread_pool_driver.cpp"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))

TEST_TIMEOUT_S = 900

PLANTED = r"""
#include <thread>
extern "C" void overflow(float* values, int count) { values[count] = 1; }
extern "C" int undefined(int value) { return value + 0x7fffffff; }
extern "C" int race() {
  int count = 0;
  std::thread other([&] { ++count; });
  ++count;
  other.join();
  return count;
}
"""


@dataclass(frozen=True)
class Sanitizer:
    """What GCC can watch in one build.

    Attributes:
        runtime: library that must be the first in the process, since Python itself is not compiled with it.
        environment: for processes that are watched.
        faults: what it must report, and Python that does it with the library ``planted`` and an array ``values``.
    """

    name: str
    flags: tuple[str, ...]
    runtime: str
    environment: Mapping[str, str]
    faults: Mapping[str, str]

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """For both steps, compiling and linking."""
        return ("-g", "-O1", "-fno-omit-frame-pointer", *self.flags)


ADDRESSES = Sanitizer(
    name="addresses and behaviour",
    flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    runtime="libasan",
    environment={
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object between zones of its own
    },
    faults={
        "heap-buffer-overflow": "planted.overflow(ctypes.c_void_p(values.ctypes.data), len(values))",
        "signed integer overflow": "planted.undefined(1)",
    },
)

THREADS = Sanitizer(
    name="threads",
    flags=("-fsanitize=thread",),
    runtime="libtsan",
    # Only what is compiled with it is watched, and torch's own threads are not.
    environment={"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0", "OMP_NUM_THREADS": "1"},
    faults={"data race": "planted.race()"},
)


def main() -> int:
    """Build and run everything; return the exit code."""
    started = time.monotonic()
    arguments = sys.argv[1:] or ["tests/kernels"]
    for sanitizer in (ADDRESSES, THREADS):
        with tempfile.TemporaryDirectory(prefix="ksana-sanitizers-") as scratch:
            watched = prove(sanitizer, Path(scratch))
            if sanitizer is THREADS:
                run_driver(sanitizer, watched, Path(scratch))
            run_tests(sanitizer, watched, arguments, Path(scratch))
    print(f"==> the sanitizers have nothing to say ({time.monotonic() - started:.0f} s)")
    return 0


def prove(sanitizer: Sanitizer, scratch: Path) -> dict[str, str]:
    """Fail unless it reports planted faults; return the environment in which Python is watched."""
    step(f"planting faults for the sanitizer of {sanitizer.name}")
    source, planted = scratch / "planted.cpp", scratch / "planted.so"
    source.write_text(PLANTED)
    run([*COMPILER, *sanitizer.compile_flags, "-shared", "-fPIC", "-pthread", str(source), "-o", str(planted)])
    loaded = run(["ldd", str(planted)])
    found = re.search(rf"{sanitizer.runtime}\.so\S* => (\S+)", loaded)
    if found is None:
        fail(f"{shlex.join(COMPILER)} links no {sanitizer.runtime}; install GCC with its sanitizers, or name it by CXX")
    watched = {**os.environ, **sanitizer.environment, "LD_PRELOAD": found[1]}
    for fault, statement in sanitizer.faults.items():
        program = (
            "import ctypes, sys, numpy\n"
            "planted, values = ctypes.CDLL(sys.argv[1]), numpy.zeros(1000, dtype=numpy.float32)\n"
            f"{statement}\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", program, str(planted)],
            env=watched,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if fault not in result.stdout or not result.returncode:
            fail(f"no {fault} was reported, and the exit code is {result.returncode}\n{result.stdout}")
        print(f"found: {fault}", flush=True)
    return watched


def run_tests(sanitizer: Sanitizer, watched: Mapping[str, str], arguments: Sequence[str], scratch: Path) -> None:
    """Run tests with a native library that the sanitizer watches."""
    step(f"compiling the native library with the sanitizer of {sanitizer.name}")
    variables = {
        "CXX": shlex.join(COMPILER),
        "CXXFLAGS": " ".join([os.environ.get("CXXFLAGS", ""), *sanitizer.compile_flags]),
        "KSANA_REQUIRE_NATIVE": "1",
    }
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(scratch)]
    run(build, {**os.environ, **variables})

    step(f"running {shlex.join(arguments)} with it")
    library = scratch / "ksana/kernels/cpu/_native.so"
    # Captured as a file, a report would vanish with the process that it ends.
    options = ["--capture=sys", "-p", "no:cacheprovider", "-o", f"timeout={TEST_TIMEOUT_S}"]
    tests = [sys.executable, "-m", "pytest", "-q", *options, *arguments]
    if code := subprocess.call(tests, cwd=ROOT, env={**watched, "KSANA_CPU_LIBRARY": str(library)}):
        fail(f"pytest ended with exit code {code}")


def run_driver(sanitizer: Sanitizer, watched: Mapping[str, str], scratch: Path) -> None:
    """Run the driver of the thread pool, which starts, ends and rests its threads more than a test of kernels does."""
    step("running the driver of the thread pool")
    driver = str(scratch / "driver")
    flags = [*sanitizer.compile_flags, "-std=c++17", "-pthread", f"-I{CSRC}"]
    run([*COMPILER, *flags, str(CSRC / "thread_pool.cpp"), str(DRIVER), "-o", driver])
    environment = {name: value for name, value in watched.items() if name != "LD_PRELOAD"}  # it is linked to it
    if code := subprocess.call([driver], env=environment):
        fail(f"the driver ended with exit code {code}")


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command that must not fail, and return what it prints."""
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        fail(f"exit code {result.returncode} from: {shlex.join(command)}\n{result.stdout}")
    return result.stdout


def step(text: str) -> None:
    """Say what comes next."""
    print(f"==> {text}", flush=True)


def fail(reason: str) -> NoReturn:
    """End with exit code 1."""
    sys.exit(f"error: {reason}")


if __name__ == "__main__":
    sys.exit(main())
