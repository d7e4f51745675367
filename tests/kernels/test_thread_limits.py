"""Threads of the native library where there are none to be had, or no longer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ksana.kernels.cpu.library import load_library

pytestmark = [
    pytest.mark.skipif(load_library() is None, reason="Ksana was installed without a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's limit of address space"),
    # That of threads lets no forked process start any, and all reserve more address space than the limit allows.
    pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers cannot follow"),
]

PRELUDE = """
import os, resource, signal, time
from ctypes import c_int64, c_void_p
import numpy as np
from ksana.kernels.cpu.library import load_library

library = load_library()
library.ksana_cpu_argmax.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p]
logits = np.random.default_rng(0).random((64, 4096), dtype=np.float32)

def compute():
    tokens, finite = np.empty(64, dtype=np.int64), np.empty(64, dtype=np.bool_)
    library.ksana_cpu_argmax(logits.ctypes.data, *logits.shape, tokens.ctypes.data, finite.ctypes.data)
    assert (tokens == logits.argmax(axis=1)).all()
"""

FORK = """
library.ksana_cpu_set_threads(3)
compute()
time.sleep(0.1)  # the workers go to sleep
child = os.fork()
if child == 0:
    signal.alarm(20)
    compute()
    for threads in (2, 4):
        assert library.ksana_cpu_set_threads(threads) == threads
        for _ in range(5):
            compute()
            time.sleep(0.01)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
compute()
"""

LIMIT = """
library.ksana_cpu_set_threads(2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26,) * 2)  # room for the stacks of a few
print(library.ksana_cpu_set_threads(1000))
compute()
"""


def run(program: str) -> str:
    """What it prints. It has a process of its own, where no other thread computes."""
    command = [sys.executable, "-c", PRELUDE + program]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    """It has none of them: neither may it hand them work, nor join them when it starts an engine of its own."""
    run(FORK)


def test_fewer_threads_than_wanted_do_not_end_the_process() -> None:
    """A container may have a limit to them."""
    assert 1 <= int(run(LIMIT)) < 1000
