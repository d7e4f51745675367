"""Engines as processes: each with a deadline, a log of its own, and asleep while another one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

import psutil

from cpu_peers.errors import EngineFailed

START_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 180.0
_STOP_DEADLINE_S = 15.0
_POLL_S = 0.01


class EngineProcess:
    """A process group that loads an engine.

    Args:
        command: program and arguments.
        environment: all variables.
        log: takes everything that the engine prints.

    Attributes:
        start_seconds: from the start of the process until the engine was ready.

    Raises:
        EngineFailed: there is no such program.
    """

    start_seconds: float

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, stdin: int, stdout: int | None
    ) -> None:
        self._log = log
        self._started = time.perf_counter()
        with log.open("wb") as file:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=stdin,
                    stdout=file if stdout is None else stdout,
                    stderr=file,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineFailed(f"cannot be started: {error}") from error

    def pause(self) -> None:
        """Stop the whole group, so that nothing in it (a spinning thread, a heartbeat) uses a processor."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Proportional set size of the process and its children: shared pages count once."""
        try:
            root = psutil.Process(self._process.pid)
            return sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])
        except psutil.Error as error:
            raise EngineFailed(f"its memory cannot be read: {error}") from error

    def close(self) -> None:
        """End the group, at the latest after some seconds by force."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_DEADLINE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _mark_ready(self) -> None:
        self.start_seconds = time.perf_counter() - self._started

    def _failure(self, what: str) -> EngineFailed:
        """Close the process and say what happened, with the end of its log."""
        self.close()
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        last = (errors or lines or ["nothing in its log"])[-1]
        return EngineFailed(f"{what}: {last[:300]} (log: {self._log})")


class DriverProcess(EngineProcess):
    """An offline engine behind a script of ``drivers/``; blocks until it is ready.

    Raises:
        EngineFailed: it ends, or is not ready in time.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        super().__init__(command, environment, log, subprocess.PIPE, subprocess.PIPE)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._receive(START_DEADLINE_S, "did not start")
        self._mark_ready()

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Decode ``tokens`` tokens after each prompt; returns seconds and tokens.

        Raises:
            EngineFailed: it fails, takes too long, or returns another number of tokens.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure("has ended") from error
        answer = self._receive(ANSWER_DEADLINE_S, "failed")
        outputs: list[list[int]] = answer["outputs"]
        if [len(output) for output in outputs] != [tokens] * len(prompts):
            raise EngineFailed(f"returned {[len(output) for output in outputs]} tokens instead of {tokens} each")
        return float(answer["seconds"]), outputs

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=deadline)
        except queue.Empty:
            raise self._failure(f"{what} within {deadline:.0f} s") from None
        if not line:
            raise self._failure(what)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put("")  # it has ended


class ServerProcess(EngineProcess):
    """An OpenAI-compatible server; blocks until it is ready.

    Args:
        command: as above; ``{port}`` in it is replaced by a free port.
        ready_path: answers 200 when the server is ready.

    Attributes:
        url: for clients.

    Raises:
        EngineFailed: it ends, or is not ready in time.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, ready_path: str) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        filled = [word.replace("{port}", str(port)) for word in command]
        super().__init__(filled, environment, log, subprocess.DEVNULL, None)
        while not self._answers(ready_path):
            if self._process.poll() is not None:
                raise self._failure("did not start")
            if time.perf_counter() - self._started > START_DEADLINE_S:
                raise self._failure(f"did not start within {START_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)
        self._mark_ready()

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
