"""What this machine can do at most: bytes read from memory and multiplications a second.

No kernel is faster than the bandwidth at which weights are read, nor than the rate of the best matrix product, so
measured speeds are best given as fractions of these.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ksana.kernels.cpu.library import load_library
from ksana.kernels.cpu.machine import processor_name, usable_cpus

_DTYPES = {"f32": 0, "bf16": 1}
"""Types of matrix products, by the numbers that the native library has for them."""

_TORCH_GEMM_SIZE = 2048
_WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Limit:
    """What so many threads can do.

    Attributes:
        read_bandwidth: bytes a second.
        gemm: operations a second, a multiplication and an addition being two, by dtype.
    """

    threads: int
    read_bandwidth: float
    gemm: dict[str, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What was measured, and with what.

    Attributes:
        method: ``native`` for Ksana's own kernels, otherwise ``torch``.
    """

    cpu: str
    method: str
    results: tuple[Limit, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Meter(Protocol):
    """Something that measures: the best of ``repeats``, in bytes or operations a second."""

    name: str

    def set_threads(self, threads: int) -> None:
        """Use so many from now on."""

    def read_bandwidth(self, num_bytes: int, repeats: int) -> float:
        """Read ``num_bytes`` of memory."""

    def gemm(self, dtype: str, repeats: int) -> float:
        """Multiply matrices, or what lies in the first cache already."""


class NativeMeter:
    """Measures with the kernels of the native library."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._set_threads = library.ksana_cpu_set_threads
        self._read_bandwidth = library.ksana_cpu_read_bandwidth
        self._gemm = library.ksana_cpu_gemm_peak
        self._set_threads.argtypes, self._set_threads.restype = [ctypes.c_int], ctypes.c_int
        self._read_bandwidth.argtypes = [ctypes.c_int64, ctypes.c_int32]
        self._gemm.argtypes = [ctypes.c_int32, ctypes.c_int32]
        self._read_bandwidth.restype = self._gemm.restype = ctypes.c_double

    def set_threads(self, threads: int) -> None:
        self._set_threads(threads)

    def read_bandwidth(self, num_bytes: int, repeats: int) -> float:
        return float(self._read_bandwidth(num_bytes, repeats))

    def gemm(self, dtype: str, repeats: int) -> float:
        return float(self._gemm(_DTYPES[dtype], repeats))


class TorchMeter:
    """Measures with torch: sums, which are a little slower than plain reads, and square matrix products."""

    name = "torch"

    def set_threads(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)

    def read_bandwidth(self, num_bytes: int, repeats: int) -> float:
        import torch

        numbers = torch.ones(num_bytes // 4)
        return num_bytes / _best_seconds(numbers.sum, repeats)

    def gemm(self, dtype: str, repeats: int) -> float:
        import torch

        size = _TORCH_GEMM_SIZE
        shape, kind = (size, size), torch.float32 if dtype == "f32" else torch.bfloat16
        left, right, product = (torch.ones(shape, dtype=kind) for _ in range(3))
        return 2 * size**3 / _best_seconds(lambda: torch.matmul(left, right, out=product), repeats)


def choose_meter() -> Meter:
    """The native one where it works."""
    library = load_library()
    return TorchMeter() if library is None else NativeMeter(library)


def measure_limits(*, num_bytes: int, repeats: int) -> Limits:
    """Measure with one thread and with all that this process may use.

    Args:
        num_bytes: memory to read; several times the last cache, or it is that which is measured.
        repeats: of every measurement; the best counts.
    """
    meter = choose_meter()
    results = []
    for threads in sorted({1, usable_cpus()}):
        meter.set_threads(threads)
        gemm = {dtype: meter.gemm(dtype, repeats) for dtype in _DTYPES}
        results.append(Limit(threads, meter.read_bandwidth(num_bytes, repeats), gemm))
    return Limits(processor_name(), meter.name, tuple(results))


def render_limits(limits: Limits) -> RenderableType:
    """The table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("threads", "read GB/s", *(f"{dtype} GEMM GFLOP/s" for dtype in _DTYPES)):
        table.add_column(heading, justify="right")
    for limit in limits.results:
        gemm = (f"{limit.gemm[dtype] / 1e9:.0f}" for dtype in _DTYPES)
        table.add_row(str(limit.threads), f"{limit.read_bandwidth / 1e9:.1f}", *gemm)
    parts: list[RenderableType] = [Text(limits.cpu, style="bold"), table]
    if limits.method != "native":
        parts.append(Text("measured with torch: Ksana's native CPU kernels are not available", style="yellow"))
    return Group(*parts)


def _best_seconds(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(_WARM_UP_RUNS + repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[_WARM_UP_RUNS:])
