"""Threads of a process that computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ksana.kernels.cpu.library import load_library

COUNT = """
import sys
from pathlib import Path
from ksana import LLM, SamplingParams
with LLM(sys.argv[1], threads=int(sys.argv[2]), num_blocks=100, backend="cpu") as llm:
    sampling = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, logprobs=3, seed=0)
    llm.generate([list(range(3, 60)), list(range(3, 80))], sampling)
    print(len(list(Path("/proc/self/task").iterdir())))
"""


def num_threads(model: Path, threads: int) -> int:
    """Threads of a process that has generated some tokens."""
    command = [sys.executable, "-c", COUNT, str(model), str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
@pytest.mark.skipif(load_library() is None, reason="Ksana was installed without a C++ compiler")
def test_one_team_of_workers_and_no_second_one(tiny_path: Callable[..., Path]) -> None:
    """Each thread asked for beyond the caller is one more: torch, or OpenMP below it, brings none of its own."""
    model = tiny_path()
    assert num_threads(model, 5) - num_threads(model, 1) == 4
