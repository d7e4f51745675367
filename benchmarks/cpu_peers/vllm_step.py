"""vLLM's cost of a step without a model, beside ours in ``benchmarks/scheduler.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cpu_peers.engines import DRIVERS, ENGINES
from cpu_peers.errors import EngineFailed
from cpu_peers.model_files import prepare_model
from cpu_peers.venvs import ensure_installed

_DEADLINE_S = 300.0


def measure_vllm_steps(venvs: Path, requests: int, steps: int, prompt: int, output: int) -> list[float]:
    """Seconds of each step of vLLM's scheduler and output processor, fed with the same requests.

    Args:
        venvs: the environments of ``compare_cpu.py``; vLLM's is made if it is not there.
        requests: running at once.
        steps: to measure.
        prompt: tokens of a prompt.
        output: tokens of an answer, at most.

    Raises:
        EngineFailed: vLLM cannot be installed, or fails.
    """
    engine = ENGINES["vllm"]
    venv = venvs / engine.name
    venvs.mkdir(parents=True, exist_ok=True)
    ensure_installed(engine, venv, venvs / "vllm-install.log")
    settings = {"model": str(prepare_model(venvs / "model").folder), "requests": requests, "steps": steps}
    settings |= {"prompt": prompt, "output": output}
    command = [str(venv / "bin" / "python"), str(DRIVERS / "vllm_scheduler.py"), json.dumps(settings)]
    try:
        finished = subprocess.run(
            command,
            env=engine.process_environment(venv, threads=1),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"vLLM's scheduler took longer than {_DEADLINE_S:.0f} s") from None
    if finished.returncode:
        print(finished.stderr, file=sys.stderr)
        raise EngineFailed("vLLM's scheduler failed; its output is above")
    seconds: list[float] = json.loads(finished.stdout)["seconds"]
    return seconds
