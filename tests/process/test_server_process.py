"""Start, signals and death of a whole server."""

from __future__ import annotations

import http.client
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.timeout(90)

Start = Callable[..., Any]


def generate_body(max_new_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"prompt": "Once upon a time", "sampling_config": sampling, "stream": False, **more}


class Background:
    """A generation that runs while the test does something else. ``started`` is set with the first token."""

    def __init__(self, url: str, max_new_tokens: int) -> None:
        self.started = threading.Event()
        self.last: dict[str, Any] = {}
        self.error: Exception | None = None
        data = json.dumps(generate_body(max_new_tokens, stream=True)).encode()
        self._request = urllib.request.Request(url + "/generate", data, {"Content-Type": "application/json"})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        last, rest = b"", b""
        try:
            with urllib.request.urlopen(self._request) as response:
                while data := response.read1(1 << 20):
                    self.started.set()
                    *whole, rest = (rest + data).split(b"\0")
                    last = whole[-1] if whole else last
            self.last = json.loads(last)
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def join(self) -> dict[str, Any]:
        self.thread.join()
        return self.last


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(start: Start) -> None:
    server = start("--port", "0")
    background = Background(server.url, 1500)
    background.started.wait()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("no new requests; 1 running")
    status, body, _ = server.request("/ready")
    assert (status, body) == (503, {"status": "draining"})
    assert server.request("/health")[0] == 200
    status, body, headers = server.request("/generate", generate_body(4))
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert "Retry-After" in headers
    assert background.join()["finish_reasons"] == ["length"]
    assert server.end() == 0
    assert "Traceback" not in server.output


def test_requests_that_do_not_end_in_time_are_aborted_and_told_so(start: Start) -> None:
    server = start("--port", "0", "--shutdown-timeout-s", "0.3")
    background = Background(server.url, 30_000)
    background.started.wait()
    server.process.send_signal(signal.SIGINT)
    assert background.join()["finish_reasons"] == ["abort"]
    assert server.end() == 0
    assert "Traceback" not in server.output


def test_a_second_signal_stops_at_once(start: Start) -> None:
    server = start("--port", "0", "--shutdown-timeout-s", "600")
    background = Background(server.url, 30_000)
    background.started.wait()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("no new requests")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 128 + signal.SIGTERM
    background.join()
    assert "Traceback" not in server.output


def test_a_killed_server_frees_its_port_and_the_next_one_serves(start: Start) -> None:
    first = start("--port", "0")
    port = urlsplit(first.url).port
    background = Background(first.url, 30_000)
    background.started.wait()
    first.process.kill()
    first.end()
    background.join()
    assert background.error is not None
    second = start("--port", str(port))
    status, body, _ = second.request("/generate", generate_body(4))
    assert (status, body["finish_reasons"]) == (200, ["length"])
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 0


def test_a_second_server_on_a_port_fails_in_one_line_before_it_loads_a_model(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("--port", str(port), "--log-level", "error")
        assert server.end() == 2
    assert len(server.lines[:-1]) == 1
    assert server.lines[0].startswith(f"ksana-serve: error: port {port} on 127.0.0.1 is already in use")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_process(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow_loader.py").write_text(
        "import time\n"
        "from ksana import hookimpl\n"
        "@hookimpl\n"
        "def ksana_load_model_config(model_path, options):\n"
        "    print('loading slowly', flush=True)\n"
        "    time.sleep(600)\n"
    )
    server = start("--port", "0", "-p", "slow_loader", PYTHONPATH=str(tmp_path))
    server.wait_for("loading slowly")
    start_time = time.monotonic()
    server.process.send_signal(number)
    assert server.end() == 0
    assert time.monotonic() - start_time < 60
    assert "Traceback" not in server.output


def test_a_plugins_thread_that_is_stuck_does_not_hold_up_the_exit(start: Start, tmp_path: Path) -> None:
    """Nor do the exit handlers of the native library in which it is stuck; those of Python are called."""
    (tmp_path / "stuck.py").write_text(
        "import atexit, ctypes, threading\n"
        "from ksana import hookimpl\n"
        "libc = ctypes.CDLL(None)\n"
        "@hookimpl\n"
        "def ksana_engine_started(engine):\n"
        "    libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)\n"
        "    atexit.register(print, 'tidied up', flush=True)\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    server = start("--port", "0", "-p", "stuck", PYTHONPATH=str(tmp_path))
    server.wait_for("ready on")
    server.process.terminate()
    assert server.end() == 0
    assert "tidied up" in server.output


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_2(start: Start, tmp_path: Path) -> None:
    server = start("--port", "0", "--model", str(tmp_path), "--log-level", "error")
    assert server.end() == 2
    assert len(server.lines[:-1]) == 1
    assert server.lines[0].startswith("ksana-serve: error: ")


@pytest.mark.parametrize("redirection", ["> >(true)", ">/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_that_nobody_listens_to_serves(model: Path, redirection: str) -> None:
    """The greeting ended the server when stdout was a closed pipe or a full disk; a closed stderr, the loading."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ksana.cli.serve", "--model", str(model), "--port", str(port), "--threads", "1"]
    shell = ["bash", "-c", f"exec {shlex.join(command)} --num-blocks 100 {redirection}"]
    process = subprocess.Popen(
        shell, stderr=subprocess.DEVNULL, env={**os.environ, "KSANA_DISABLE_PLUGIN_AUTOLOAD": "1"}
    )
    try:
        while not _is_ready(port):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()


def test_a_log_that_nobody_reads_does_not_stop_the_server(model: Path) -> None:
    """A pipe holds 64 KiB; whoever writes more to a stalled reader waits, and with the event loop everybody does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ksana.cli.serve", "--model", str(model), "--port", str(port), "--threads", "1"]
    environment = {**os.environ, "KSANA_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [*command, "--num-blocks", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    try:
        while not _is_ready(port):
            assert process.poll() is None
            time.sleep(0.05)
        for _ in range(1000):  # an access line of some 100 bytes each
            assert _is_ready(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()


def test_more_connections_than_files_are_refused_and_no_harm_is_done(start: Start, model: Path) -> None:
    """A loop that cannot accept, and is told so again and again, took a processor and wrote 25 MB of log in 5 s."""
    server = start("--port", "0", "--model", str(model), "--num-blocks", "100")
    address = urlsplit(server.url)
    used = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 10, before[1]))
    with ExitStack() as connections:
        for _ in range(60):
            connections.enter_context(socket.create_connection((address.hostname, address.port)))
        time.sleep(1)
        assert len(server.output) < 100_000
    while True:
        try:
            assert server.request("/health")[0] == 200
            break
        except OSError:  # its places are not free yet
            time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_killed_server_leaves_a_trace_that_can_be_loaded(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    server = start("--port", "0", "--trace", str(path))
    background = Background(server.url, 30_000)
    background.started.wait()
    while '"decode"' not in path.read_text():
        time.sleep(0.01)
    server.process.kill()
    server.end()
    background.join()
    whole, _, last = path.read_text().rpartition(",\n")
    try:
        events = [*json.loads(whole + "]"), json.loads(last)]
    except ValueError:  # the kill came between two pages of one write
        events = json.loads(whole + "]")
    assert {"schedule", "execute", "process", "queued", "prefill", "decode"} <= {event["name"] for event in events}


def test_a_trace_that_cannot_be_written_is_one_line_and_exit_2(start: Start) -> None:
    server = start("--port", "0", "--trace", "/dev/full", "--log-level", "error")
    assert server.end() == 2
    assert server.lines[:-1] == ["ksana-serve: error: --trace /dev/full: cannot be written: No space left on device\n"]
