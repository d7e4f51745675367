"""Time of a step's projections on the native CPU kernels, by format of the weights and number of rows.

    python benchmarks/quantized_products.py --threads 2

The shapes are those of the demo model's layers. The formats take turns; the fastest of all rounds counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from ksana.kernels.cpu.library import load_library
from ksana.kernels.cpu.native import NativeKernels
from ksana.kernels.cpu.native_backend import NativeCPUBackend
from ksana.kernels.quantization import quantize
from ksana.kernels.weights import Linear
from ksana.types.config import KernelConfig

NUM_LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 4, 8, 12, 16, 32, 64, 256, 1024)
FORMATS = {"bf16": None, "int8-64": (8, 64), "int4-32": (4, 32), "int4-64": (4, 64), "int4-128": (4, 128)}
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all")
    threads = parser.parse_args().threads
    library = load_library()
    if library is None:
        raise SystemExit("quantized_products.py: the native kernels are not built")
    backend = NativeCPUBackend(KernelConfig(threads=threads), NativeKernels(library))
    models = {name: make_layers(backend, kind) for name, kind in FORMATS.items()}
    print(f"| rows | {' | '.join(FORMATS)} |\n|{'---|' * (len(FORMATS) + 1)}")
    for rows in ROWS:
        times = measure(backend, models, rows)
        cells = [f"{ms:.1f} ms" if name == "bf16" else f"{times['bf16'] / ms:.2f}" for name, ms in times.items()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def make_layers(backend: NativeCPUBackend, kind: tuple[int, int] | None) -> list[Linear]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=generator).bfloat16() for _ in range(NUM_LAYERS) for shape in SHAPES]
    return [backend.pack_linear(w if kind is None else quantize(w, *kind, torch.bfloat16)) for w in weights]


def measure(backend: NativeCPUBackend, models: dict[str, list[Linear]], rows: int) -> dict[str, float]:
    """Milliseconds by format."""
    inputs = {columns: torch.randn(rows, columns).bfloat16() for _, columns in SHAPES}
    best = dict.fromkeys(models, float("inf"))
    for _ in range(ROUNDS):
        for name, linears in models.items():
            start = time.perf_counter()
            for linear in linears:
                backend.logits(inputs[linear.packed.struct.in_features], linear)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


if __name__ == "__main__":
    main()
