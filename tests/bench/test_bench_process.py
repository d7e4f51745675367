"""ksana-bench as a process: Ctrl-C, and a stdout that nobody reads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

CHUNK = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}\n\n'
COMMAND = [sys.executable, "-m", "ksana.bench.command"]
DEADLINE_S = 60


async def answer(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(CHUNK + LAST)
    return response


class Endless:
    """Answers that never end. ``asked`` is set as soon as there is one."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.asked.set()
        while True:
            await response.write(CHUNK)
            await asyncio.sleep(0.02)


def test_ctrl_c_reports_what_there_is(odd: Callable[..., Any]) -> None:
    served = threading.Semaphore(0)

    async def counting(request: web.Request) -> web.StreamResponse:
        response = await answer(request)
        served.release()
        return response

    with odd(counting) as url:
        command = [*COMMAND, "--base-url", url, "--request-rate", "20"]
        process = subprocess.Popen(
            [*command, "--num-requests", "10000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(5):
            assert served.acquire(timeout=DEADLINE_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert stderr == ""
    assert "complete, " in stdout and "interrupted or not sent" in stdout
    assert "TTFT" in stdout


@pytest.mark.parametrize("where", ["while the answers are given up", "while the event loop is closed"])
def test_a_second_ctrl_c_is_no_exception(where: str) -> None:
    """Which would break into the event loop's own code: that ends with tracebacks of its own."""
    script = f"""
import asyncio, os, signal, uvloop
from ksana.bench.runner import _interrupts

async def main():
    stop = asyncio.Event()
    with _interrupts(stop):
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        if {where.endswith("given up")}:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(10)

uvloop.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("pause_s", [0.0005, 0.004])
def test_impatient_ctrl_c_ends_it_without_a_word(odd: Callable[..., Any], pause_s: float) -> None:
    endless = Endless()
    with odd(endless.answer) as url:
        process = subprocess.Popen(
            [*COMMAND, "--base-url", url, "--num-requests", "40", "--concurrency", "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert endless.asked.wait(DEADLINE_S)
        for _ in range(1000):
            process.send_signal(signal.SIGINT)
            time.sleep(pause_s)
            if process.poll() is not None:
                break
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (130, -signal.SIGINT)  # the latter when Python itself is ending already
    assert stderr == ""


def test_an_interrupted_run_lasted_until_then(odd: Callable[..., Any]) -> None:
    """Not until the last whole answer, of which there may be none."""
    endless = Endless()
    with odd(endless.answer) as url:
        process = subprocess.Popen(
            [*COMMAND, "--base-url", url, "--num-requests", "1"], stdout=subprocess.PIPE, text=True
        )
        assert endless.asked.wait(DEADLINE_S)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    duration = re.search(r"duration +([\d.]+) s", stdout)
    assert duration is not None and float(duration[1]) >= 0.3


@pytest.mark.parametrize("stdout", ["a full disk", "a closed pipe"])
def test_files_are_written_whatever_becomes_of_stdout(odd: Callable[..., Any], tmp_path: Path, stdout: str) -> None:
    document, table = tmp_path / "run.json", tmp_path / "runs.csv"
    sink = os.open("/dev/full", os.O_WRONLY) if stdout == "a full disk" else closed_pipe()
    with odd(answer) as url:
        command = [*COMMAND, "--base-url", url, "--num-requests", "2", "--request-rate", "50", "--rate-step", "50"]
        command += ["--num-rates", "2", "--json", str(document), "--csv", str(table)]
        done = subprocess.run(command, stdout=sink, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)
    os.close(sink)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Cannot write to stdout" in done.stderr
    assert len(json.loads(document.read_text())["runs"]) == 2
    assert len(table.read_text().splitlines()) == 3


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
