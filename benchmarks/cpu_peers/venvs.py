"""Environments for the peers: one each, with pinned versions, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cpu_peers.engines import Engine
from cpu_peers.errors import EngineFailed

INSTALL_DEADLINE_S = 1800.0
_STAMP = "installed.txt"


def ensure_installed(engine: Engine, venv: Path, log: Path) -> None:
    """Install an engine that is not there yet, or there in another version.

    Args:
        venv: its environment.
        log: takes what pip prints.

    Raises:
        EngineFailed: pip fails or takes too long.
    """
    if not engine.requirements:
        return
    stamp = venv / _STAMP
    wanted = "\n".join(engine.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {engine.title} into {venv}; this takes minutes ...", file=sys.stderr)
    with log.open("wb") as file:
        _run([sys.executable, "-m", "venv", str(venv)], {}, file.fileno(), log)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--no-input"]
        _run([*pip, "install", *engine.requirements], engine.build_options, file.fileno(), log)
        if engine.unwanted:
            _run([*pip, "uninstall", "--yes", *engine.unwanted], {}, file.fileno(), log)
    stamp.write_text(wanted)


def _run(command: list[str], variables: dict[str, str], output: int, log: Path) -> None:
    try:
        subprocess.run(
            command,
            env={**os.environ, **variables},
            check=True,
            timeout=INSTALL_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"was not installed within {INSTALL_DEADLINE_S:.0f} s (log: {log})") from None
    except subprocess.CalledProcessError as error:
        errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise EngineFailed(f"cannot be installed: {(errors or [str(error)])[-1]} (log: {log})") from error
