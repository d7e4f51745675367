"""The limits of the machine, as ``ksana-bench limits`` measures them, with the threads given as the one argument.

Prints one JSON object: the method, bytes/s, FLOP/s.
"""

from __future__ import annotations

import json
import sys

from ksana.bench.limits import choose_meter

READ_BYTES = 2**28  # as much as a decode step of the model reads
REPEATS = 15


def main() -> None:
    meter = choose_meter()
    meter.set_threads(int(sys.argv[1]))
    limits = {
        "method": meter.name,
        "read_bandwidth": meter.read_bandwidth(READ_BYTES, REPEATS),
        "gemm_bf16": meter.gemm("bf16", REPEATS),
        "gemm_f32": meter.gemm("f32", REPEATS),
    }
    print(json.dumps(limits))


if __name__ == "__main__":
    main()
