"""A master of our own: only where nobody listens, as long as we live, and again if it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ksana.errors import UsageError
from ksana.testing.waiting import wait_until
from ksana_mooncake.addresses import Address
from ksana_mooncake.master import LocalMaster, find_master
from ksana_mooncake.options import GlobalCacheOptions


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks often."""
    monkeypatch.setattr("ksana_mooncake.master._POLL_S", 0.05)


@pytest.fixture
def address(free_port: Callable[[], int]) -> Address:
    return Address("127.0.0.1", free_port())


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A stand-in that listens as a master does, and says how it was called."""
    script = tmp_path / "mooncake_master"
    script.write_text(
        f"#!{sys.executable}\n"
        "import socket, sys\n"
        "print('called with', *sys.argv[1:], flush=True)\n"
        "arguments = dict(word[2:].partition('=')[::2] for word in sys.argv[1:])\n"
        "with socket.create_server((arguments['rpc_address'], int(arguments['rpc_port']))) as server:\n"
        "    while True:\n"
        "        server.accept()[0].close()\n"
    )
    script.chmod(0o755)
    return str(script)


def test_it_listens_where_it_should_and_nowhere_else(real_options: GlobalCacheOptions, address: Address) -> None:
    """The real one: not even its metrics are open to other machines."""
    master = LocalMaster(find_master(""), address)
    master.start()
    wait_until(lambda: address.answers(1.0))
    listening = [
        connection.laddr
        for connection in psutil.Process(master.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert address in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}
    master.stop()
    assert address.is_free


def test_a_master_of_others_is_left_alone_and_replaced_when_it_is_gone(program: str, address: Address) -> None:
    with socket.create_server(address):
        master = LocalMaster(program, address)
        master.start()
        assert master.pid is None
    wait_until(lambda: master.pid is not None)
    master.stop()


def test_it_is_started_again(program: str, address: Address, caplog: pytest.LogCaptureFixture) -> None:
    master = LocalMaster(program, address)
    master.start()
    wait_until(lambda: address.answers(1.0))
    first = master.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: master.pid not in (None, first) and address.answers(1.0))
    master.stop()
    assert "has ended with code -9" in caplog.text


def test_one_that_does_not_listen_to_reason_is_killed(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksana_mooncake.master._LONGEST_STOP_S", 0.1)
    script = tmp_path / "mooncake_master"
    script.write_text("#!/bin/sh\ntrap '' TERM\necho deaf >$0.says\nwhile :; do sleep 0.05; done\n")
    script.chmod(0o755)
    master = LocalMaster(str(script), address)
    master.start()
    wait_until(Path(f"{script}.says").exists)
    pid = master.pid
    assert pid is not None
    master.stop()
    assert not psutil.pid_exists(pid)


def test_a_failure_to_start_one_is_not_the_last_try(
    program: str, address: Address, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = subprocess.Popen, iter([True])

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        if next(failures, False):
            raise BlockingIOError(11, "planted: no more processes")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    master = LocalMaster(program, address)
    master.start()
    wait_until(lambda: address.answers(1.0))
    master.stop()
    assert f"no Mooncake master can be started at {address}: [Errno 11] planted" in caplog.text


def test_a_program_that_ends_at_once_is_told_once_with_its_last_words(
    tmp_path: Path, address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "no_master"
    script.write_text("#!/bin/sh\necho once >>$0.runs\necho unknown flag\nexit 3\n")
    script.chmod(0o755)
    runs = Path(f"{script}.runs")
    caplog.set_level("INFO", logger="ksana.mooncake")
    master = LocalMaster(str(script), address)
    master.start()
    wait_until(lambda: runs.exists() and len(runs.read_text().split()) >= 4)
    master.stop()
    started, ended = [record.getMessage() for record in caplog.records]
    assert "started a Mooncake master" in started
    assert f"({script}) has ended with code 3 after" in ended
    assert "saying 'unknown flag'" in ended


def test_what_it_says_is_in_our_log(program: str, address: Address, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="ksana.mooncake")
    master = LocalMaster(program, address)
    master.start()
    wait_until(lambda: f"mooncake_master: called with --rpc_address=127.0.0.1 --rpc_port={address.port}" in caplog.text)
    master.stop()


def test_it_ends_with_a_parent_that_is_killed(program: str, address: Address) -> None:
    code = (
        "import sys, time\n"
        "from ksana_mooncake.addresses import Address\n"
        "from ksana_mooncake.master import LocalMaster\n"
        "master = LocalMaster(sys.argv[1], Address('127.0.0.1', int(sys.argv[2])))\n"
        "master.start()\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, program, str(address.port)]) as parent:
        wait_until(lambda: address.answers(1.0))
        parent.kill()
    wait_until(lambda: address.is_free)


def test_the_operators_program_comes_first(program: str) -> None:
    assert find_master(program) == program


@pytest.mark.parametrize("name", ["missing", "no_program"])
def test_a_program_that_cannot_be_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "no_program").write_text("hello")
    with pytest.raises(UsageError, match=f"MOONCAKE_MASTER_BIN .*{name} is no program that can be run"):
        find_master(str(tmp_path / name))
