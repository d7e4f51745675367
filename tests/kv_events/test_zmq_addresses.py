"""Where a ZeroMQ publisher listens, and what it does to others who are there."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from ksana.errors import UsageError
from ksana.kv_events.log import EventLog
from ksana.kv_events.transports.zmq_publisher import ZmqPublisher

Publish = Callable[..., ZmqPublisher]

BOTH_FLAGS = pytest.mark.parametrize("option", ["endpoint", "replay_endpoint"])


def flag_of(option: str) -> str:
    return f"--kv-events-{option.replace('_', '-')}"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def answers(publisher: ZmqPublisher) -> bool:
    """Whether who asks there for everything hears something."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as requests:
        requests.setsockopt(zmq.LINGER, 0)
        requests.connect(publisher.replay_endpoint)
        requests.send_multipart((b"", bytes(8)))
        return bool(requests.poll(5000))


@pytest.fixture
def short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the current one: paths of sockets must be short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@BOTH_FLAGS
def test_a_port_in_use_is_refused(publish: Publish, option: str) -> None:
    publisher = publish(EventLog(10))
    expected = f"{flag_of(option)}: cannot listen at {publisher.endpoint}: Address already in use"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        publish(EventLog(10), **{option: publisher.endpoint})


@BOTH_FLAGS
def test_a_socket_file_in_use_is_refused(publish: Publish, short_path: Path, option: str) -> None:
    """A second server must not take over the stream of the first one."""
    publisher = publish(EventLog(10), endpoint="ipc://a")
    expected = f"{flag_of(option)}: cannot listen at {publisher.replay_endpoint}: Address already in use"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        publish(EventLog(10), **{option: publisher.replay_endpoint})
    assert answers(publisher)


def test_an_abstract_name_in_use_is_refused(publish: Publish, short_path: Path) -> None:
    name = f"@ksana-test-{short_path.name}-{id(short_path)}"
    publisher = publish(EventLog(10), endpoint=f"ipc://{name}")
    assert answers(publisher)
    with pytest.raises(UsageError, match=r"--kv-events-endpoint: .*: Address already in use$"):
        publish(EventLog(10), endpoint=f"ipc://{name}")
    assert not list(short_path.iterdir())


@BOTH_FLAGS
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_stays(publish: Publish, short_path: Path, option: str, kind: str) -> None:
    target, path = short_path / "target", short_path / "precious.txt"
    target.write_text("all I have")
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.write_text("all I have")
    expected = f"{flag_of(option)}: cannot listen at ipc://precious.txt: it is a {kind}, not a socket"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        publish(EventLog(10), **{option: "ipc://precious.txt"})
    assert path.is_dir() if kind == "directory" else path.read_text() == "all I have"
    assert path.is_symlink() == (kind == "link")


def test_a_socket_file_of_a_killed_server_is_replaced(publish: Publish, short_path: Path) -> None:
    for name in ("a", "a.replay"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(name)
            killed.listen()
    assert answers(publish(EventLog(10), endpoint="ipc://a"))


def test_socket_files_go_with_their_publisher(publish: Publish, short_path: Path) -> None:
    (short_path / "b").write_text("")
    with pytest.raises(UsageError, match="it is a file"):
        publish(EventLog(10), endpoint="ipc://a", replay_endpoint="ipc://b")
    assert [path.name for path in short_path.iterdir()] == ["b"]
    publisher = publish(EventLog(10), endpoint="ipc://a")
    publisher.close()
    assert [path.name for path in short_path.iterdir()] == ["b"]


def test_the_socket_file_of_a_successor_stays(publish: Publish, short_path: Path) -> None:
    """Somebody has removed the file by hand, and started another server."""
    first = publish(EventLog(10), endpoint="ipc://a")
    for name in ("a", "a.replay"):
        (short_path / name).unlink()
    second = publish(EventLog(10), endpoint="ipc://a")
    first.close()
    assert answers(second)


@BOTH_FLAGS
@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("5557", "it is neither tcp:// nor ipc://"),
        ("http://127.0.0.1:5557", "it is neither tcp:// nor ipc://"),
        ("inproc://a", "it is neither tcp:// nor ipc://"),  # nobody outside could reach it
        ("x:", "it is neither tcp:// nor ipc://"),
        ("tcp://127.0.0.1", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:99999", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:65536", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:-1", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:80a", "it has no port from 0 to 65535"),
        ("tcp://127.0.0.1:५", "it has no port from 0 to 65535"),
        ("tcp://no-such-host.invalid:5557", "no host or network interface of that name is known"),
        ("ipc://", "it has no path"),
        ("ipc://@", "it has no path"),
        ("ipc://*", "it has no path"),
    ],
)
def test_what_is_no_address_is_refused(publish: Publish, option: str, endpoint: str, reason: str) -> None:
    hint = "it must be like tcp://127.0.0.1:5557 or ipc:///run/kv-events"
    expected = f"{flag_of(option)}: cannot listen at {endpoint}: {reason}; {hint}"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        publish(EventLog(10), **{option: endpoint})


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://192.0.2.1:5557", "that is no address of this machine"),
        ("ipc://no/such/folder", "No such file or directory"),
        (f"ipc://{'a' * 200}", "AF_UNIX path too long"),
    ],
)
def test_where_nobody_can_listen(publish: Publish, endpoint: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"cannot listen at {endpoint}: {reason}$"):
        publish(EventLog(10), endpoint=endpoint)


def test_requests_go_to_the_next_port(publish: Publish) -> None:
    for port in range(42_000, 42_200, 2):
        with contextlib.suppress(UsageError):  # somebody else has one of the two
            publisher = publish(EventLog(10), endpoint=f"tcp://127.0.0.1:{port}")
            assert publisher.replay_endpoint == f"tcp://127.0.0.1:{port + 1}"
            return
    pytest.fail("no two free ports")


@pytest.mark.parametrize("port", ["0", "*"])
def test_any_free_port_may_be_taken(publish: Publish, port: str) -> None:
    """The one for requests must not be the one after 0."""
    publisher = publish(EventLog(10), endpoint=f"tcp://127.0.0.1:{port}")
    assert port_of(publisher.endpoint) >= 1024
    assert port_of(publisher.replay_endpoint) >= 1024
    assert answers(publisher)


def test_no_port_comes_after_the_last_one(publish: Publish) -> None:
    endpoint = "tcp://127.0.0.1:65535"
    with pytest.raises(UsageError, match=r"no port comes after 65535 .* with --kv-events-replay-endpoint$"):
        publish(EventLog(10), endpoint=endpoint)
    publish(EventLog(10), endpoint=endpoint, replay_endpoint="tcp://127.0.0.1:0")
