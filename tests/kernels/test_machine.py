"""What a container grants, read from control group files."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from ksana.kernels.cpu.machine import available_memory, usable_cpus

MIB = 2**20


def write(root: Path, **files: object) -> Path:
    """Files of a control group; a double underscore in a name is a folder, a single one before the end a dot."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def v2(root: Path, **files: object) -> Path:
    for name, content in files.items():
        (root / name.replace("_", ".", 1)).write_text(f"{content}\n")
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_cpu_quota_of_cgroup_v2(tmp_path: Path, quota: str, cpus: int) -> None:
    assert usable_cpus(v2(tmp_path, cpu_max=quota)) == cpus


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("quota", "cpus"), [(-1, 8), (300000, 3), (10000, 1)])
def test_cpu_quota_of_cgroup_v1(tmp_path: Path, quota: int, cpus: int) -> None:
    root = write(tmp_path, **{"cpu__cpu.cfs_quota_us": quota, "cpu__cpu.cfs_period_us": 100000})
    assert usable_cpus(root) == cpus


@pytest.mark.usefixtures("eight_cpus")
def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none") == 8


@pytest.mark.usefixtures("eight_cpus")
def test_unreadable_quota_is_no_quota(tmp_path: Path) -> None:
    assert usable_cpus(v2(tmp_path, cpu_max="garbage of three words")) == 8
    assert usable_cpus(v2(tmp_path, cpu_max="many some")) == 8


@pytest.fixture
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 1000 * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("roomy_machine")
def test_memory_limit_of_cgroup_v2(tmp_path: Path) -> None:
    assert available_memory(v2(tmp_path, memory_max=300 * MIB, memory_current=100 * MIB)) == 200 * MIB
    assert available_memory(v2(tmp_path, memory_max="max", memory_current=100 * MIB)) == 1000 * MIB
    assert available_memory(v2(tmp_path, memory_max=50 * MIB, memory_current=100 * MIB)) == 0


@pytest.mark.usefixtures("roomy_machine")
def test_memory_limit_of_cgroup_v1(tmp_path: Path) -> None:
    files = {"memory__memory.limit_in_bytes": 300 * MIB, "memory__memory.usage_in_bytes": 100 * MIB}
    assert available_memory(write(tmp_path, **files)) == 200 * MIB
    assert available_memory(write(tmp_path, **{"memory__memory.limit_in_bytes": 2**63 - 4096})) == 1000 * MIB


@pytest.mark.usefixtures("roomy_machine")
def test_cached_files_do_not_count_as_used(tmp_path: Path) -> None:
    """Right after the weights were read the usage of a container is mostly their page cache."""
    stat = f"anon {10 * MIB}\nfile {185 * MIB}\ninactive_file {100 * MIB}\nactive_file {80 * MIB}\nshmem {5 * MIB}"
    root = v2(tmp_path, memory_max=300 * MIB, memory_current=200 * MIB, memory_stat=stat)
    assert available_memory(root) == 280 * MIB


@pytest.mark.usefixtures("roomy_machine")
def test_cached_files_do_not_count_as_used_in_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "memory__memory.limit_in_bytes": 300 * MIB,
        "memory__memory.usage_in_bytes": 200 * MIB,
        "memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file {80 * MIB}",
    }
    assert available_memory(write(tmp_path, **files)) == 280 * MIB


@pytest.mark.usefixtures("roomy_machine")
def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none") == 1000 * MIB
