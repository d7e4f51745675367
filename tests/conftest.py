"""Fixtures that several test folders share."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ksana import LLM
from ksana.testing import tiny_model

# Every run of the default profile draws the same examples; the nightly one draws many, and others each time.
_SLOW_MACHINES = [HealthCheck.too_slow]
settings.register_profile(
    "default",
    max_examples=50,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW_MACHINES,
)
settings.register_profile(
    "nightly", max_examples=1000, stateful_step_count=100, deadline=None, suppress_health_check=_SLOW_MACHINES
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

_NIGHTLY_TIMEOUT_S = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The timeout of a single test is meant for the default profile."""
    if PROFILE == "nightly":
        for item in items:
            item.add_marker(pytest.mark.timeout(_NIGHTLY_TIMEOUT_S))


@pytest.fixture
def write_package(tmp_path: Path) -> Callable[..., Path]:
    """Write an installed package with an entry point, as pip would leave it; returns the folder for ``sys.path``."""

    def write(name: str, source: str, *, distribution: str = "", version: str = "1.0", value: str = "") -> Path:
        site = tmp_path / "site"
        module = f"{name}_module"
        distribution = distribution or f"ksana-{name}"
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[ksana]\n{name} = {value or module}\n")
        (site / f"{module}.py").write_text(source)
        return site

    return write


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model; made once for equal arguments."""

    @cache
    def make(key: tuple[tuple[str, str], ...], architecture: str) -> Path:
        overrides = {name: ast.literal_eval(value) for name, value in key}
        return tiny_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)

    def tiny(architecture: str = "llama", **overrides: Any) -> Path:
        return make(tuple((name, repr(value)) for name, value in sorted(overrides.items())), architecture)

    return tiny


@contextmanager
def _serve_demo(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "ksana.cli.serve", "--model", "demo", "--port", "0", "--no-access-log", *flags]
    # Threads that spin for each other are slow beyond measure where other processes want the same cores.
    environment = {**os.environ, "KSANA_KERNEL_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            greeting = server.stdout.readline()
            assert greeting.startswith("Ksana is ready on http://"), "the server did not start"
            yield greeting
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def serve_demo() -> Callable[..., AbstractContextManager[str]]:
    """``with serve_demo(*flags) as greeting``: the demo model in a process of its own, and the line it greets with."""
    return _serve_demo


@pytest.fixture
def enable_async() -> bool:
    """Whether engines overlap steps. Folders whose tests are about the engine run them in both ways."""
    return False


@pytest.fixture
def start_llm(enable_async: bool) -> Iterator[Callable[..., LLM]]:
    """Start an offline engine that verifies its blocks whenever it is idle; at the end no block may be missing."""
    started: list[tuple[LLM, int]] = []

    def start(model: Path | str, **options: Any) -> LLM:
        llm = LLM(
            str(model),
            **{"check_integrity": True, "threads": 1, "num_blocks": 200, "enable_async": enable_async, **options},
        )
        started.append((llm, llm.engine.num_free_blocks))
        return llm

    yield start
    for llm, free_at_start in started:
        llm.close()
        assert llm.engine.num_unfinished() == 0
        assert llm.engine.num_free_blocks == free_at_start
