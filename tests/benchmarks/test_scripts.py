"""The scripts run, small: nobody else notices when what they measure has changed under them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 120

MODEL_LESS = {
    "kv_manager.py": "--tokens 2000 --rounds 2",
    "scheduler.py": "--requests 4 --steps 20 --rounds 1 --prompt 16",
    "server_overhead.py": "--streams 2 --tokens 5 --rounds 1 --interval-ms 1",
    "window_memory.py": "",
}
WITH_MODEL = {
    "perplexity.py": "--length 32 --only f32 bf16",
    "speculation.py": "--rounds 1 --requests 1",
    "structured_output.py": "--concurrency 1",
}


@pytest.mark.parametrize("script", MODEL_LESS)
def test_a_script_without_a_model_prints_figures(script: str) -> None:
    assert any(character.isdigit() for character in run(script, *MODEL_LESS[script].split()))


@pytest.mark.parametrize("script", WITH_MODEL)
def test_a_script_with_a_model_prints_figures(script: str, tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    arguments = WITH_MODEL[script].split()
    if script == "perplexity.py":
        text = tmp_path / "text.txt"
        text.write_text("The kettle sings above the fire. " * 20)
        arguments += ["--text", str(text)]
    assert any(character.isdigit() for character in run(script, "--model", str(tiny_path()), *arguments))


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
