"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
