from __future__ import annotations

import itertools
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ksana.config.compose import compose_config
from ksana.config.options import OptionRegistry
from ksana.config.settings import Setting
from ksana.errors import UsageError
from ksana.testing.waiting import wait_until
from ksana.types.config import KsanaConfig
from ksana_mooncake import plugin
from ksana_mooncake.addresses import Address
from ksana_mooncake.client import StoreClient
from ksana_mooncake.connector import client_maker
from ksana_mooncake.master import LocalMaster, find_master
from ksana_mooncake.mooncake_client import MooncakeClient
from ksana_mooncake.options import GlobalCacheOptions
from ksana_mooncake.store import MooncakeStore

Open = Callable[..., MooncakeStore]

BLOCK_BYTES = 3 * 64
"""Of the blocks of ``make_blocks``."""

KEY_PREFIX = "0123456789abcdef-"

OPTIONS = GlobalCacheOptions(
    backend="mooncake-mock",
    metadata_server="P2PHANDSHAKE",
    master=Address("127.0.0.1", 1),
    starts_master=False,
    protocol="tcp",
    rdma_devices="",
    role="",
    timeout_s=2.0,
    max_retry=3,
    fetch_thread_num=2,
    global_segment_size=16 << 20,
    local_buffer_size=1 << 20,
    reads_in_place=False,
    master_bin="",
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port that nobody uses yet."""
    return _free_port


@pytest.fixture
def make_blocks() -> Callable[..., list[list[np.ndarray]]]:
    """Blocks of random content, each in pieces of their own."""

    def make(number: int, seed: int = 0, layers: int = 3, size: int = 64) -> list[list[np.ndarray]]:
        draw = np.random.default_rng(seed)
        return [[draw.integers(0, 256, size, dtype=np.uint8) for _ in range(layers)] for _ in range(number)]

    return make


@pytest.fixture
def keys() -> list[str]:
    """Four keys as the connector makes them, of this test alone."""
    return [f"{KEY_PREFIX}0-{uuid.uuid4().hex}" for _ in range(4)]


@pytest.fixture
def count_stored() -> Callable[[MooncakeStore, list[str]], int]:
    """What ``contains`` says in the end."""

    def count(store: MooncakeStore, wanted: list[str]) -> int:
        while (found := store.contains(wanted)) is None:
            time.sleep(0.001)
        return found

    return count


@pytest.fixture(scope="session")
def real_options() -> GlobalCacheOptions:
    """Options of the real store, on a port of their own; skips where Mooncake does not work."""
    options = replace(OPTIONS, backend="mooncake", master=Address("127.0.0.1", _free_port()))
    try:
        client_maker(options)
    except UsageError as error:
        pytest.skip(str(error))
    return options


class LastingClient(MooncakeClient):
    """A client that one store after the other uses: to leave Mooncake takes two seconds."""

    is_connected = False

    def connect(self) -> int:
        code = 0 if self.is_connected else super().connect()
        self.is_connected = code == 0
        return code

    def close(self) -> None:
        pass

    def leave(self) -> None:
        super().close()


Clients = dict[tuple[Address, int], LastingClient]


@pytest.fixture(scope="session")
def real_clients() -> Clients:
    """Clients by master and number."""
    return {}


@contextmanager
def run_master(options: GlobalCacheOptions, clients: Clients) -> Iterator[LocalMaster]:
    master = LocalMaster(find_master(""), options.master)
    master.start()
    yield master
    for key in [key for key in clients if key[0] == options.master]:
        clients.pop(key).leave()  # while their master is there: without it they take minutes
    master.stop()


@pytest.fixture(scope="session")
def real_master(real_options: GlobalCacheOptions, real_clients: Clients) -> Iterator[GlobalCacheOptions]:
    """A running master that tests share, as options."""
    with run_master(real_options, real_clients):
        yield real_options


@pytest.fixture(scope="module")
def own_master(
    real_options: GlobalCacheOptions, real_clients: Clients
) -> Iterator[tuple[LocalMaster, GlobalCacheOptions]]:
    """A master that may be hurt, and options; for all tests of a module, since leaving it takes seconds."""
    options = replace(real_options, master=Address("127.0.0.1", _free_port()))
    with run_master(options, real_clients) as master:
        yield master, options


_BACKENDS = {
    "mock": {},
    "mock-in-place": {"reads_in_place": True},
    "mooncake": {},
    "mooncake-in-place": {"reads_in_place": True},
}


@pytest.fixture(params=_BACKENDS)
def options(request: pytest.FixtureRequest) -> GlobalCacheOptions:
    """Options of each backend, and of each way to read."""
    return _options_of(request, lambda: request.getfixturevalue("real_master"))


@pytest.fixture(params=_BACKENDS)
def own_options(request: pytest.FixtureRequest) -> GlobalCacheOptions:
    """The same for a store that may be filled: its master goes on evicting for a moment, whatever comes next."""
    return _options_of(request, lambda: request.getfixturevalue("own_master")[1])


def _options_of(request: pytest.FixtureRequest, real: Callable[[], GlobalCacheOptions]) -> GlobalCacheOptions:
    is_real = request.param.startswith("mooncake")
    base = real() if is_real else replace(OPTIONS, master=Address("127.0.0.1", _free_port()))
    return replace(base, **_BACKENDS[request.param])


@pytest.fixture
def lasting_client(real_clients: Clients) -> Callable[..., LastingClient]:
    """A client of the real store by number; the same in other tests."""

    def client(options: GlobalCacheOptions, number: int) -> LastingClient:
        key = options.master, number
        if key not in real_clients:
            real_clients[key] = LastingClient(options)
        return real_clients[key]

    return client


@pytest.fixture
def connect_client(lasting_client: Callable[..., LastingClient]) -> Callable[[GlobalCacheOptions], StoreClient]:
    """A connected client beside the store of the test."""

    def connect(options: GlobalCacheOptions) -> StoreClient:
        client = lasting_client(options, 1) if options.backend == "mooncake" else client_maker(options)()
        wait_until(client.is_reachable)
        assert client.connect() == 0
        return client

    return connect


@pytest.fixture
def open_store(lasting_client: Callable[..., LastingClient]) -> Iterator[Open]:
    """Make a store that is connected."""
    with ExitStack() as stack:
        numbers = itertools.count()

        def make(options: GlobalCacheOptions, create: Callable[[], StoreClient] | None = None) -> MooncakeStore:
            if create is None and options.backend == "mooncake":
                create = partial(lasting_client, options, next(numbers))
            create = create or client_maker(options)
            store = MooncakeStore(options, create, block_bytes=BLOCK_BYTES, key_prefix=KEY_PREFIX)
            stack.callback(store.close)
            wait_until(lambda: store.is_up)
            return store

        yield make


@pytest.fixture
def make_config() -> Callable[..., KsanaConfig]:
    """A configuration with some options of this plugin."""
    registry = OptionRegistry()
    plugin.ksana_addoption(registry.view_for("mooncake"))

    def make(**values: object) -> KsanaConfig:
        settings = {("plugin_options", "mooncake", name): Setting(value, name) for name, value in values.items()}
        return compose_config(None, {}, settings, registry).config

    return make


@pytest.fixture
def own_mock() -> GlobalCacheOptions:
    """Options of a mock store of the test's own."""
    return replace(OPTIONS, master=Address("127.0.0.1", _free_port()))
