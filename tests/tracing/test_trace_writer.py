"""The file of a trace: always loadable, never in the way."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import UsageError
from ksana.tracing import TraceWriter, writer

FIRST = {"ph": "M", "name": "process_name"}


def event(number: int) -> dict[str, Any]:
    return {"ph": "i", "name": 'a "quoted" name\n\udc80', "number": number}


def numbers(path: Path) -> list[int]:
    return [found["number"] for found in json.loads(path.read_text())[1:]]


def wait_for(path: Path, text: str) -> str:
    deadline = time.monotonic() + 20
    while text not in (content := path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return content


def test_all_events_arrive_in_order_and_the_file_is_json(tmp_path: Path) -> None:
    trace = TraceWriter(str(tmp_path / "trace.json"), FIRST)
    for number in range(10_000):
        trace.emit(event(number))
    trace.close()
    trace.close()
    assert numbers(tmp_path / "trace.json") == list(range(10_000))


def test_the_file_can_be_loaded_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(str(path), FIRST)
    assert json.loads(path.read_text() + "]") == [FIRST]
    trace.emit(event(0))
    content = wait_for(path, '"number":0')
    assert json.loads(content + "]") == [FIRST, event(0)]
    assert len(content.splitlines()) == 3
    trace.close()


def test_events_of_several_threads_are_all_written(tmp_path: Path) -> None:
    trace = TraceWriter(str(tmp_path / "trace.json"), FIRST)
    threads = [
        threading.Thread(target=lambda k=k: [trace.emit(event(1000 * k + i)) for i in range(1000)]) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert sorted(numbers(tmp_path / "trace.json")) == list(range(4000))


@pytest.mark.parametrize("path", ["/no/such/folder/trace.json", "/", "/dev/full"])
def test_a_file_that_cannot_be_written_is_an_error_at_once(path: str) -> None:
    with pytest.raises(UsageError, match=rf"--trace {re.escape(path)}: cannot be written: \w+"):
        TraceWriter(path, FIRST)


def test_what_a_slow_disk_cannot_take_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_EVENTS", 10)
    monkeypatch.setattr(writer, "_WRITE_INTERVAL_S", 60.0)
    trace = TraceWriter(str(tmp_path / "trace.json"), FIRST)
    for number in range(25):
        trace.emit(event(number))
    trace.close()
    assert numbers(tmp_path / "trace.json") == list(range(10))
    assert "15 events were dropped" in caplog.text


FULL_DISK = """
import logging, resource, sys, time
from ksana.tracing import TraceWriter
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
trace = TraceWriter(sys.argv[1], {"ph": "M"})
for number in range(5000):
    trace.emit({"ph": "i", "number": number, "padding": "x" * 50})
while trace._thread.is_alive():
    time.sleep(0.01)
trace.emit({"ph": "i", "number": -1})
trace.close()
"""


def test_a_disk_that_fills_up_ends_the_trace_with_one_warning_and_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert result.stderr.count("tracing ends here") == 1
    assert "Traceback" not in result.stderr
    found = [line["number"] for line in json.loads(path.read_text() + "]")[1:]]
    assert found == list(range(len(found))) and found
    dropped = re.search(r"(\d+) events were dropped", result.stderr)
    assert dropped and len(found) + int(dropped[1]) == 5001


def test_the_writer_is_silent_when_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TraceWriter(str(tmp_path / "trace.json"), FIRST).close()
    assert caplog.text == ""
