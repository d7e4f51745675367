"""A Mooncake master of our own, where none is running."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from ksana.errors import UsageError
from ksana_mooncake.addresses import Address
from ksana_mooncake.backoff import Backoff

logger = logging.getLogger("ksana.mooncake")

_PROGRAM = "mooncake_master"
_POLL_S = 1.0
_SHORT_LIFE_S = 10.0
"""A master that ends sooner has not worked."""

_LONGEST_WAIT_S = 30.0
_LONGEST_STOP_S = 3.0
_LONGEST_KILL_S = 1.0

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG lasts beyond exec. It refers to the thread that has started the process, which therefore lives as
long as the process should. A parent that has died before that is noticed by its number."""


def find_master(given: str) -> str:
    """The program of the master: the one that the operator names, that of the installed package, or one on ``PATH``.

    Raises:
        UsageError: there is none, or the named one is no program.
    """
    if given:
        if not os.access(given, os.X_OK) or not Path(given).is_file():
            raise UsageError(f"MOONCAKE_MASTER_BIN (--mooncake-master-bin) {given} is no program that can be run")
        return given
    package = importlib.util.find_spec("mooncake")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (program := Path(folder) / _PROGRAM).is_file():
            if not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o100)
            return str(program)
    found = shutil.which(_PROGRAM)
    if found is None:
        raise UsageError(f"no {_PROGRAM} is installed: set MOONCAKE_MASTER_BIN, or start one at another machine")
    return found


class LocalMaster:
    """Sees to it that somebody listens at an address of this machine, by starting a master whenever nobody does.

    A master that others have started is left alone, and replaced when it is gone. Ours ends with this process, however
    that ends; with it goes what the cache of all held, since masters keep in memory where everything is.

    Args:
        program: see :func:`find_master`.
        address: where it is to listen for clients; its metrics are on a port of its own choice, for this machine only.
    """

    def __init__(self, program: str, address: Address) -> None:
        self._program = program
        self._address = address
        self._backoff = Backoff(_POLL_S, _LONGEST_WAIT_S)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._has_complained = False
        self._thread = threading.Thread(target=self._supervise, name="mooncake-master", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process number of the master that runs on our account."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the master, if it is ours; a few seconds at most."""
        self._stopping.set()
        if (process := self._process) is not None:
            process.terminate()
        self._thread.join(_LONGEST_STOP_S)
        if self._thread.is_alive() and (process := self._process) is not None:
            process.kill()
            self._thread.join(_LONGEST_KILL_S)

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            if self._address.is_free:
                self._run_once()
                self._stopping.wait(self._backoff.take())
            else:
                self._backoff.reset()
                self._stopping.wait(_POLL_S)

    def _run_once(self) -> None:
        """Run a master to its end, and say how that went unless it goes on as before."""
        started = time.monotonic()
        try:
            end = self._run()
        except OSError as error:
            end = f"no Mooncake master can be started at {self._address}: {error}"
        if time.monotonic() - started > _SHORT_LIFE_S:
            self._backoff.reset()
            self._has_complained = False
        # Of several servers that start one at the same time, one succeeds.
        if self._stopping.is_set() or not self._address.is_free:
            return
        level = logging.DEBUG if self._has_complained else logging.WARNING
        logger.log(level, "%s; the next one is started, at growing intervals if that goes on", end)
        self._has_complained = True

    def _run(self) -> str:
        """Run a master to its end, and pass on what it says; returns how it has ended."""
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), self._program]
        arguments = [
            f"--rpc_address={self._address.host}",
            f"--rpc_port={self._address.port}",
            "--metrics_host=127.0.0.1",
            "--metrics_port=0",
            "--logtostderr",
            "--minloglevel=1",  # the level below has a line for every block
        ]
        started = time.monotonic()
        with subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            self._process = process
            level = logging.DEBUG if self._has_complained else logging.INFO
            logger.log(level, "started a Mooncake master at %s (process %d)", self._address, process.pid)
            if self._stopping.is_set():
                process.terminate()
            assert process.stdout is not None
            last_words = ""
            for line in process.stdout:
                last_words = line.rstrip()
                logger.debug("mooncake_master: %s", last_words)
        self._process = None
        name = f"the Mooncake master at {self._address} ({self._program})"
        said = f", saying {last_words!r}" if last_words else ""
        return f"{name} has ended with code {process.returncode} after {time.monotonic() - started:.1f} s{said}"
