"""The scripts run, small: nobody else notices when what they measure has changed under them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_client import run_server

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 100

MODEL_LESS = [
    ("kv_manager.py --tokens 2000 --rounds 2", r"hashing: ([\d.]+) M", 1),
    ("scheduler.py --requests 4 --steps 20 --rounds 1 --prompt 16", r"mean ([\d.]+) ms", 1),
    ("server_overhead.py --streams 2 --tokens 5 --rounds 1 --interval-ms 10", r"streams: +([\d.]+) us", 3),
    ("window_memory.py", r"\| 512 \| ([\d.]+) \|", 1),
]
WITH_MODEL = [
    ("perplexity.py --length 32 --only f32 bf16", r"\| (?:f32|bf16) \| ([\d.]+) \|", 2),
    ("speculation.py --rounds 1 --requests 1", r" ([\d.]+) tok/s", 6),
    ("structured_output.py --concurrency 1", r": ([\d.]+) tokens/s, with a schema [\d.]+", 2),
]
"""Command line, a figure in what it prints, and how often that is there."""


@pytest.mark.parametrize(("command", "figure", "count"), MODEL_LESS)
def test_a_script_without_a_model_prints_figures(command: str, figure: str, count: int) -> None:
    check(run(*command.split()), figure, count)


@pytest.mark.parametrize(("command", "figure", "count"), WITH_MODEL)
def test_a_script_with_a_model_prints_figures(
    command: str, figure: str, count: int, tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = [*command.split(), "--model", str(tiny_path())]
    if command.startswith("perplexity.py"):
        text = tmp_path / "text.txt"
        text.write_text("The kettle sings above the fire. " * 20)
        arguments += ["--text", str(text)]
    check(run(*arguments), figure, count)


def test_a_server_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="did not start"), run_server("/no/such/model", []):
        pytest.fail("there is no server")
    assert "/no/such/model" in capfd.readouterr().err


def test_an_error_of_the_caller_ends_the_server(tiny_path: Callable[..., Path]) -> None:
    """It would be waited for, for ever."""
    with pytest.raises(ZeroDivisionError), run_server(str(tiny_path()), ["--num-blocks", "32"]):
        _ = 1 / 0


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(printed: str, figure: str, count: int) -> None:
    found = re.findall(figure, printed)
    assert len(found) == count, printed
    assert all(float(number) > 0 for number in found), printed
