"""Whole servers as processes of their own, with a tiny random model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ksana.testing.tiny_models import tiny_model


class ServerProcess:
    """A started ``ksana-serve``; ``lines`` grows as it writes."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ksana.cli.serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "KSANA_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self.lines.append("(end)")
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """Everything written so far."""
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches; fails if the process ends first."""
        with self._changed:
            while True:
                if match := re.search(pattern, self.output):
                    return match
                assert self.lines[-1:] != ["(end)"], self.output
                self._changed.wait()

    @property
    def url(self) -> str:
        """Base URL, once the server is ready."""
        return self.wait_for(r"ready on (https?://\S+)")[1]

    def end(self) -> int:
        """Wait for the exit; returns its code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def request(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any], Any]:
        """Send one request; returns status, body and headers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), error.headers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can generate for a long time."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=32768, num_hidden_layers=1)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """``start(*flags, **environment)`` starts a server that ends with the test at the latest."""
    with ExitStack() as stack:

        def start_server(*flags: str, **environment: str) -> ServerProcess:
            flags = ("--model", str(model), "--threads", "1", "--num-blocks", "2200", *flags)
            server = ServerProcess(*flags, **environment)
            stack.callback(server.process.kill)
            return server

        yield start_server
