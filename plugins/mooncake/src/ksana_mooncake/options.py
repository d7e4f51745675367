"""The options of the global cache, and what becomes of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ksana.errors import UsageError
from ksana_mooncake.addresses import P2P_HANDSHAKE, Address, parse_endpoint, parse_master

if TYPE_CHECKING:
    from ksana.config.options import OptionRegistry
    from ksana.types.config import KsanaConfig

logger = logging.getLogger("ksana.mooncake")

GROUP = "mooncake"
CONNECTOR = "global_cache"

Backend = Literal["mooncake", "mooncake-mock"]
Protocol = Literal["tcp", "rdma"]
Role = Literal["", "prefill", "decode"]
ZeroCopy = Literal["auto", "always", "never"]

_SMALLEST_SEGMENT = 16 << 20
"""Bytes; Mooncake refuses less."""

_INFINIBAND = Path("/sys/class/infiniband")
"""Has an entry for each RDMA device."""


def add_options(options: OptionRegistry) -> None:
    """Add the options; most are keys of ``setting.global_cache_connector`` in the original's YAML file."""
    from typing import Annotated

    from pydantic import ByteSize, Field

    def add(name: str, type: Any, default: Any, help: str, **names: str) -> None:
        options.add(GROUP, name, type, default=default, help=help, **names)

    port = Annotated[int, Field(ge=0, le=65535)]
    add(
        "enable_hook",
        bool,
        False,
        "share the KV cache with other servers; starts a Mooncake master if its address is of this machine and free",
        flag="--enable-global-cache-hook",
        env="ENABLE_GLOBAL_CACHE_HOOK",
    )
    add(
        "service_endpoint",
        str,
        "",
        "metadata server http://HOST:PORT/metadata, or P2PHANDSHAKE for none; empty: no global cache",
    )
    add("master_server_addr", str, "127.0.0.1:50051", "HOST:PORT of the Mooncake master")
    add("backend_type", Backend, "mooncake", "mooncake, or mooncake-mock: a store within this process, for tests")
    add("protocol", Protocol, "tcp", "how blocks travel")
    add("rdma_devices", str, "", "RDMA devices, divided by commas; empty: Mooncake chooses")
    add("role", Role, "", "prefill: store blocks only; decode: look for blocks only; empty: both")
    add("timeout_ms", Annotated[int, Field(ge=10, le=600_000)], 5000, "longest that an answer is waited for")
    add("max_retry", Annotated[int, Field(ge=0, le=100)], 3, "further tries for a block that could not be read")
    add("fetch_thread_num", Annotated[int, Field(ge=1, le=64)], 4, "threads that read blocks")
    add(
        "global_segment_size",
        ByteSize,
        16 << 20,
        "memory that this server lends to the cache of all: 1GiB, or bytes; 0: none, else at least 16MiB",
    )
    add("local_buffer_size", ByteSize, 16 << 20, "memory through which blocks come that are not read in place")
    add(
        "zero_copy",
        ZeroCopy,
        "auto",
        "read blocks straight into the cache; auto: over RDMA, where it is faster than by way of a buffer",
    )
    add("http_port", port, 0, "port of the metadata server, which must be that of the endpoint; 0: what that says")
    add("rpc_port", port, 0, "port of the master, which must be that of its address; 0: what that says")
    add(
        "master_bin",
        str,
        "",
        "program of the Mooncake master; default: the installed one",
        env="MOONCAKE_MASTER_BIN",
    )


@dataclass(frozen=True, slots=True)
class GlobalCacheOptions:
    """The options, checked against each other.

    Attributes:
        metadata_server: what Mooncake's client is told about how to find others.
        master: address of the master.
        starts_master: a master is to be started here when nobody listens at its address.
        timeout_s: see ``timeout_ms``; the other attributes are the options of that name.
    """

    backend: Backend
    metadata_server: str
    master: Address
    starts_master: bool
    protocol: Protocol
    rdma_devices: str
    role: Role
    timeout_s: float
    max_retry: int
    fetch_thread_num: int
    global_segment_size: int
    local_buffer_size: int
    reads_in_place: bool
    master_bin: str

    @property
    def name(self) -> str:
        """What the log calls the store."""
        if self.backend == "mooncake-mock":
            return "the global cache within this process (mooncake-mock)"
        return f"the global cache at {self.master}"

    @property
    def loads(self) -> bool:
        """Whether blocks are looked for."""
        return self.role != "prefill"

    @property
    def saves(self) -> bool:
        """Whether blocks are stored."""
        return self.role != "decode"

    @classmethod
    def of(cls, config: KsanaConfig) -> GlobalCacheOptions:
        """Read the options.

        Raises:
            UsageError: they contradict each other, or two services would share a port.
        """
        values: dict[str, Any] = config.plugin_options[GROUP]
        endpoint = parse_endpoint(values["service_endpoint"] or P2P_HANDSHAKE)
        master = parse_master(values["master_server_addr"])
        _check_port("--mooncake-http-port", values["http_port"], "--mooncake-service-endpoint", endpoint)
        _check_port("--mooncake-rpc-port", values["rpc_port"], "--mooncake-master-server-addr", master)
        is_real = values["backend_type"] == "mooncake"
        if is_real:
            _check_apart(config.server.port, endpoint, master)
        # A metadata server of this machine would be ours to start. It would listen to everybody, and clients do as well
        # without one, so we start none.
        has_server = endpoint is not None and not endpoint.is_loopback
        return cls(
            backend=values["backend_type"],
            metadata_server=values["service_endpoint"] if has_server else P2P_HANDSHAKE,
            master=master,
            starts_master=is_real and values["enable_hook"] and master.is_of_this_machine,
            protocol=values["protocol"],
            rdma_devices=values["rdma_devices"],
            role=values["role"],
            timeout_s=values["timeout_ms"] / 1000,
            max_retry=values["max_retry"],
            fetch_thread_num=values["fetch_thread_num"],
            global_segment_size=values["global_segment_size"],
            local_buffer_size=values["local_buffer_size"],
            reads_in_place=values["zero_copy"] == "always"
            or (values["zero_copy"] == "auto" and values["protocol"] == "rdma"),
            master_bin=values["master_bin"],
        )


def check_machine(options: GlobalCacheOptions) -> None:
    """Refuse what Mooncake would refuse again and again. To be called before the model takes its memory.

    Raises:
        UsageError: a size is too small, or more than is free, or no RDMA device has the name that is given.
    """
    from ksana.kernels.cpu.machine import available_memory

    segment, buffer = options.global_segment_size, options.local_buffer_size
    if segment and segment < _SMALLEST_SEGMENT:
        raise UsageError(f"--mooncake-global-segment-size {segment} is too small: must be 0, or 16MiB or more")
    free = available_memory()
    for flag, size in (("--mooncake-global-segment-size", segment), ("--mooncake-local-buffer-size", buffer)):
        if size > free:
            raise UsageError(f"{flag} {size} is too large: {free >> 20}MiB of memory are free")
    if options.backend == "mooncake" and options.protocol == "rdma":
        _check_devices(options.rdma_devices)


def _check_devices(wanted: str) -> None:
    devices = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if wanted and not set(wanted.replace(" ", "").split(",")) & set(devices):
        found = ", ".join(devices) or "none"
        raise UsageError(f"--mooncake-rdma-devices {wanted}: this machine has no such device in {_INFINIBAND}: {found}")
    if not devices:
        logger.warning(
            "there is no RDMA device in %s: Mooncake takes TCP, as with --mooncake-protocol tcp", _INFINIBAND
        )


def is_wanted(config: KsanaConfig) -> bool:
    """Whether the options ask for the global cache, or the list of connectors names it."""
    values = config.plugin_options[GROUP]
    asked_for = bool(values["enable_hook"] and values["service_endpoint"])
    return asked_for or CONNECTOR in config.kv_transfer.connectors


def warn_of_halves(config: KsanaConfig) -> None:
    """Log a line if only one of the two things is there that the global cache needs."""
    values = config.plugin_options[GROUP]
    if is_wanted(config) or bool(values["enable_hook"]) == bool(values["service_endpoint"]):
        return
    missing = "--mooncake-service-endpoint" if values["enable_hook"] else "ENABLE_GLOBAL_CACHE_HOOK=1"
    logger.warning("there is no global cache: %s is missing", missing)


def _check_port(flag: str, port: int, address_flag: str, address: Address | None) -> None:
    if port and (address is None or address.port != port):
        other = P2P_HANDSHAKE if address is None else f"port {address.port}"
        raise UsageError(f"{flag} says {port} and {address_flag} says {other}: give both the same port")


def _check_apart(server_port: int, endpoint: Address | None, master: Address) -> None:
    """Refuse two services of this machine on one port: the second would not start, or take the first one's place."""
    services = {"the server (--port)": server_port}
    if endpoint is not None and endpoint.is_of_this_machine:
        services["the metadata server (--mooncake-service-endpoint)"] = endpoint.port
    if master.is_of_this_machine:
        services["the Mooncake master (--mooncake-master-server-addr)"] = master.port
    users: dict[int, str] = {}
    for name, port in services.items():
        if port and port in users:
            raise UsageError(f"{users[port]} and {name} want the same port {port}: give one of them another")
        users[port] = name
