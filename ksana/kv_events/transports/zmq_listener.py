"""Addresses at which a publisher listens: checked, and bound without harm to what others have there."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from ksana.errors import UsageError

_LAST_PORT = 65535
_BACKLOG = 100
_HINT = "; it must be like tcp://127.0.0.1:5557 or ipc:///run/kv-events"
_REASONS = {
    errno.ENODEV: "no host or network interface of that name is known",
    errno.EADDRNOTAVAIL: "that is no address of this machine",
}


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a socket that listens.

    Attributes:
        path: absolute.
        identity: device and inode; others may have put something else there meanwhile.
    """

    path: Path
    identity: tuple[int, int]

    @classmethod
    def at(cls, path: str) -> SocketFile:
        """The one that has just been bound."""
        absolute = Path(path).absolute()
        return cls(absolute, _identity(absolute))

    def remove(self) -> None:
        """Remove it if it is still there. Do this before the socket is closed: afterwards a successor may take it."""
        with contextlib.suppress(OSError):
            if _identity(self.path) == self.identity:
                self.path.unlink()


def listen(bound: zmq.Socket[bytes], flag: str, endpoint: str) -> SocketFile | None:
    """Bind a socket of ZeroMQ.

    Args:
        bound: the socket.
        flag: what the address was given by.
        endpoint: ``tcp://HOST:PORT``, where port ``0`` or ``*`` is a free one, ``ipc://FILE``, or ``ipc://@NAME``. A
            file may be there already if it is a socket at which nobody listens: the one of a process that was killed.

    Returns:
        The file that should be removed at the end, if there is one.

    Raises:
        UsageError: it is no such address, or somebody else has it.
    """
    try:
        if endpoint.startswith("ipc://"):
            return _listen_at_file(bound, endpoint)
        _check_tcp(endpoint)
        if "[" in endpoint:
            bound.setsockopt(zmq.IPV6, 1)
        bound.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        hint = _HINT if error.errno in (errno.EINVAL, errno.ENODEV) else ""
        raise UsageError(f"{flag}: cannot listen at {endpoint}: {_reason(error)}{hint}") from None
    return None


def replay_endpoint_beside(endpoint: str) -> str:
    """The address for requests if none is configured.

    Args:
        endpoint: of the stream, where a socket listens already.

    Returns:
        The port after it; any free one beside any free one; for a file the one with ``.replay`` behind it.

    Raises:
        UsageError: there is no port after it.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.rpartition(":")
    if port == "*" or int(port) == 0:
        return endpoint
    if int(port) == _LAST_PORT:
        raise UsageError(
            f"--kv-events-endpoint: no port comes after {_LAST_PORT} for requests; "
            "name an address for them with --kv-events-replay-endpoint"
        )
    return f"{host}:{int(port) + 1}"


def _check_tcp(endpoint: str) -> None:
    """By itself ZeroMQ takes 16 bits of any number as a port, and also transports that end with the process."""
    if not endpoint.startswith("tcp://"):
        raise OSError(errno.EINVAL, "it is neither tcp:// nor ipc://")
    port = re.fullmatch(r"tcp://.+:([0-9]{1,5}|\*)", endpoint)
    if not port or (port[1] != "*" and int(port[1]) > _LAST_PORT):
        raise OSError(errno.EINVAL, f"it has no port from 0 to {_LAST_PORT}")


def _listen_at_file(bound: zmq.Socket[bytes], endpoint: str) -> SocketFile | None:
    """Give ZeroMQ a socket that listens already: by itself it would delete whatever has the path."""
    path = endpoint.removeprefix("ipc://")
    if path in ("", "@", "*") or "\0" in path:
        raise OSError(errno.EINVAL, "it has no path")
    is_abstract = path.startswith("@")
    with socket.socket(socket.AF_UNIX) as listener:
        _bind_unless_taken(listener, f"\0{path[1:]}" if is_abstract else path)
        listener.listen(_BACKLOG)
        file = None if is_abstract else SocketFile.at(path)
        bound.setsockopt(zmq.USE_FD, listener.fileno())
        bound.bind(endpoint)
        listener.detach()  # it is ZeroMQ's to close
    return file


def _bind_unless_taken(listener: socket.socket, path: str) -> None:
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_left_behind(path):
            raise
        Path(path).unlink()
        listener.bind(path)


def _is_left_behind(path: str) -> bool:
    """Whether there is a socket at which nobody listens.

    Raises:
        FileExistsError: it is no socket.
    """
    if path.startswith("\0"):  # such names vanish with their sockets
        return False
    mode = Path(path).lstat().st_mode
    if not stat.S_ISSOCK(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file"
        raise FileExistsError(errno.EEXIST, f"it is a {kind}, not a socket")
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.setblocking(False)
        return visitor.connect_ex(path) == errno.ECONNREFUSED


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _reason(error: OSError | zmq.ZMQError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = error.errno or 0
    return _REASONS.get(number) or zmq.strerror(number)  # the error's own text ends with the address once more
