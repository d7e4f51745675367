"""Whole servers as processes of their own, which share a cache by way of a real master."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from ksana.testing.waiting import wait_until
from ksana_mooncake.addresses import Address
from ksana_mooncake.options import GlobalCacheOptions

NUM_TOKENS = 2000
BLOCK_SIZE = 16


class Server:
    """A started ``ksana-serve`` with the demo model, and its log."""

    def __init__(self, folder: Path, number: int, master: Address) -> None:
        self.log = folder / f"server{number}.log"
        flags = ["--mooncake-service-endpoint", "P2PHANDSHAKE", "--mooncake-master-server-addr", str(master)]
        flags += ["--mooncake-global-segment-size", "256MiB", "--mooncake-timeout-ms", "2000"]
        environment = {
            **os.environ,
            "ENABLE_GLOBAL_CACHE_HOOK": "1",
            "KSANA_KERNEL_THREADS": "1",
            "KSANA_CACHE_NUM_BLOCKS": "1000",
        }
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ksana.cli.serve", "--model", "demo", "--port", "0", *flags],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def says(self, pattern: str) -> re.Match[str] | None:
        text = self.log.read_text()
        assert self.process.poll() is None, text
        return re.search(pattern, text)

    @property
    def url(self) -> str:
        ready = self.says(r"Ksana is ready on (\S+)")
        assert ready is not None
        return ready[1]

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=100)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached_tokens(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def prompt(seed: int, length: int = NUM_TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 20_000) for _ in range(length)]


def master_of(servers: list[Server]) -> psutil.Process:
    """The master that one of the servers has started."""
    (found,) = (
        child
        for server in servers
        for child in psutil.Process(server.process.pid).children()
        if child.name() == "mooncake_master"
    )
    return found


def count_of(name: str, servers: list[Server], address: Address) -> int:
    """A metric of the master."""
    for connection in master_of(servers).net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port != address.port:
            text = httpx.get(f"http://127.0.0.1:{connection.laddr.port}/metrics").text
            count = re.search(rf"^{name} (\d+)", text, re.MULTILINE)
            assert count is not None, text
            return int(count[1])
    raise AssertionError("the master has no metrics")


@pytest.fixture(scope="module")
def address(real_options: GlobalCacheOptions, free_port: Callable[[], int]) -> Address:
    return Address("127.0.0.1", free_port())


@pytest.fixture(scope="module")
def servers(address: Address, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, which have joined the cache."""
    folder = tmp_path_factory.mktemp("servers")
    started = [Server(folder, number, address) for number in range(2)]
    try:
        for server in started:
            wait_until(partial(server.says, "Ksana is ready on"))
            wait_until(partial(server.says, "connected to the global cache"))
        yield started
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def test_the_second_server_fetches_what_the_first_has_computed(servers: list[Server], address: Address) -> None:
    first, second = servers
    computed = first.complete(prompt(1))
    wait_until(lambda: count_of("master_key_count", servers, address) >= NUM_TOKENS // BLOCK_SIZE)
    fetched = second.complete(prompt(1))
    assert tokens(fetched) == tokens(computed)
    assert cached_tokens(computed) == 0
    assert cached_tokens(fetched) == (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    metrics = httpx.get(f"{second.url}/metrics").text
    assert f'ksana_external_cached_prompt_tokens_total{{tier="remote"}} {cached_tokens(fetched)}.0' in metrics


def test_every_request_is_answered_when_the_master_dies(servers: list[Server], address: Address) -> None:
    """It is killed while the second server loads; another one takes its place."""
    first, second = servers
    prompts = [prompt(seed, 600) for seed in range(10, 14)]
    num_stored = count_of("master_key_count", servers, address)
    num_loads = count_of("master_batch_get_replica_list_requests_total", servers, address)
    with ThreadPoolExecutor(4) as clients:
        computed = list(clients.map(first.complete, prompts))
        wait_until(lambda: count_of("master_key_count", servers, address) >= num_stored + 4 * (600 // BLOCK_SIZE))
        answers = [clients.submit(second.complete, each) for each in prompts]
        wait_until(lambda: count_of("master_batch_get_replica_list_requests_total", servers, address) > num_loads)
        master_of(servers).kill()
        assert [tokens(answer.result()) for answer in answers] == [tokens(answer) for answer in computed]
    wait_until(lambda: num_masters(servers) == 1)
    seeds = itertools.count(100)

    def is_shared_again() -> bool:
        again = prompt(next(seeds), 200)
        first.complete(again)
        return cached_tokens(second.complete(again)) > 0

    wait_until(is_shared_again)


def test_a_server_that_stops_leaves_the_cache_and_ends_its_master(servers: list[Server]) -> None:
    master = master_of(servers)
    [owner] = [server for server in servers if server.process.pid == master.ppid()]
    owner.process.terminate()
    assert owner.process.wait() == 0
    assert not master.is_running()


def test_a_master_that_hangs_does_not_spoil_the_stop(servers: list[Server], address: Address) -> None:
    """Of Mooncake, which would wait for it and let nothing else run meanwhile, not even at the exit of the process."""
    [server] = [server for server in servers if server.process.poll() is None]
    wait_until(lambda: num_masters([server]) == 1 and address.answers(1.0))
    master_of([server]).suspend()
    server.process.terminate()
    assert server.process.wait() == 0
    log = server.log.read_text()
    assert "did not stop" not in log
    assert f"the global cache at {address} does not answer" in log


def num_masters(servers: list[Server]) -> int:
    children = [child for server in servers for child in psutil.Process(server.process.pid).children()]
    return [child.name() for child in children if child.is_running()].count("mooncake_master")
