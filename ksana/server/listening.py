"""The server's socket: taken before the model is loaded, opened after."""

from __future__ import annotations

import errno
import ipaddress
import socket

from ksana.errors import UsageError


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind without listening, so that a second server on the port fails before it has loaded a model for nothing.

    SO_REUSEADDR is needed only where connections of an earlier server linger. Elsewhere it would let two sockets share
    a port until the first one listens, so it is tried second here, and set for good by :func:`prepare_to_listen`.

    Raises:
        UsageError: the address does not resolve, is not ours, or is taken.
    """
    try:
        addresses = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"cannot resolve the address {host!r} to listen on: {error.strerror or error}") from None
    # "localhost" may be both ::1 and 127.0.0.1, and more clients try the latter.
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    failure: OSError | None = None
    for reuse in (0, 1):
        candidate = socket.socket(family, kind, protocol)
        try:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            candidate.bind(address)
            return candidate
        except OSError as error:
            candidate.close()
            failure = error
    assert failure is not None
    raise bind_error(host, port, failure)


def prepare_to_listen(bound: socket.socket) -> None:
    """Let a later server take the port at once, while connections of this one linger."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def bind_error(host: str, port: int, error: OSError) -> UsageError:
    """What to tell the operator about a failed bind or listen."""
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"port {port} on {host} is already in use; stop the other server or choose another --port")
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} on {host} needs privileges that this user lacks; choose a --port above 1023")
    return UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}")


def is_local(bound: socket.socket) -> bool:
    """True if only programs on this machine can reach the socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket, *, secure: bool = False) -> str:
    """The URL at which a client on this machine reaches the socket, with ``secure`` by HTTPS."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{host}:{port}"
