"""What this process may use of the machine: processors and memory, container limits included."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")

_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""Limit, usage, statistics, and the prefix of the latter's keys: cgroup v2, then v1."""


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Processors that this process may use: its affinity, cut by the container's CPU quota (cgroup v2 or v1)."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return granted if quota is None else max(1, min(granted, math.ceil(quota)))


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process could still allocate: of the machine, or of its container if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_file, prefix in _MEMORY_FILES:
        limit, usage = _read_int(cgroup / limit_file), _read_int(cgroup / usage_file)
        if limit is not None and usage is not None:
            used = usage - _file_cache(cgroup / stat_file, prefix)
            free = min(free, max(0, limit - used))
    return free


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model as the system knows it, or its architecture: for people who compare measurements."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of cached files: counted as used, but given up for whoever allocates. Weights just read are such."""
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(values.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    except (OSError, ValueError):
        return 0


def _cpu_quota(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        v1_quota = _read_int(cgroup / "cpu/cpu.cfs_quota_us")
        v1_period = _read_int(cgroup / "cpu/cpu.cfs_period_us")
        return v1_quota / v1_period if v1_quota and v1_quota > 0 and v1_period else None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
