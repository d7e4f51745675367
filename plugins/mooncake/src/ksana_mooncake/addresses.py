"""Where Mooncake's services listen, as the operator says it in several places that must agree."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from ksana.errors import UsageError

P2P_HANDSHAKE = "P2PHANDSHAKE"
"""Mooncake's word for clients that find each other without a metadata server."""


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if nobody but this machine can mean the same by it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_of_this_machine(self) -> bool:
        """True if a service of this machine may listen there."""
        return self._can_bind(0)

    @property
    def is_free(self) -> bool:
        """True if nobody listens there, and a service of this machine may."""
        return self._can_bind(self.port)

    def answers(self, timeout_s: float) -> bool:
        """Whether somebody listens there and reacts, each within ``timeout_s``.

        For a process that hangs the system still accepts connections. One that runs closes its end of a connection
        when we have closed ours, whatever protocol it speaks.
        """
        try:
            with socket.create_connection(self, timeout_s) as connection:
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
                return True
        except OSError:
            return False

    def local_host(self) -> str:
        """The address of this machine from which that one is reached."""
        try:
            family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"

    def _can_bind(self, port: int) -> bool:
        try:
            family, _, _, _, target = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                return True
        except OSError:
            return False


def parse_master(text: str) -> Address:
    """Read ``HOST:PORT``.

    Raises:
        UsageError: it is something else.
    """
    return _address(f"//{text}", "--mooncake-master-server-addr", text, "HOST:PORT")


def parse_endpoint(text: str) -> Address | None:
    """The address of the metadata server that a URL names; None for ``P2PHANDSHAKE``.

    Raises:
        UsageError: it is neither.
    """
    if text == P2P_HANDSHAKE:
        return None
    expected = f"a URL such as http://HOST:PORT/metadata, or {P2P_HANDSHAKE}"
    if not text.startswith(("http://", "https://")):
        raise _unreadable("--mooncake-service-endpoint", text, expected)
    return _address(text, "--mooncake-service-endpoint", text, expected)


def _address(url: str, flag: str, text: str, expected: str) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise _unreadable(flag, text, expected)
    return Address(host, port)


def _unreadable(flag: str, text: str, expected: str) -> UsageError:
    # In front of an @ may be a password, which must not get into a log.
    shown = repr(text) if "@" not in text else repr("...@" + text.rpartition("@")[2])
    return UsageError(f"{flag} {shown} is not valid: must be {expected}")
