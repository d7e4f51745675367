"""Keys and values that a request keeps in a model with sliding windows, and what they would be without them.

    python benchmarks/window_memory.py                                      # the shape of Gemma 3 1B
    python benchmarks/window_memory.py --full 10 --sliding 52 --window 1024 --kv-heads 16 --head-size 128

Counted from the tables of the cache manager, which takes a request through its prompt chunk by chunk, without a model.
"""

from __future__ import annotations

import argparse

from ksana.kv import KVCacheManager
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec, cdiv
from ksana.types.request import Request
from ksana.types.sampling import SamplingParams

_BLOCK_SIZE = 16
_CHUNK = 1024
_MIB = 2**20


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", type=int, default=4, help="layers of full attention")
    parser.add_argument("--sliding", type=int, default=22, help="layers with a window")
    parser.add_argument("--window", type=int, default=512, help="tokens of the window")
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-size", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32_768])
    args = parser.parse_args()
    shape = (_BLOCK_SIZE, args.kv_heads, args.head_size, "bfloat16")
    blocks = cdiv(max(args.lengths) + _CHUNK, _BLOCK_SIZE) + 1
    full = KVCacheGroup(FullAttentionSpec(*shape), tuple(range(args.full)), blocks)
    layers = tuple(range(args.full, args.full + args.sliding))
    window = KVCacheGroup(SlidingWindowSpec(*shape, args.window), layers, blocks)
    print("| tokens | between steps | in a step of 1,024 | all layers full | saved |\n|---|---|---|---|---|")
    for length in args.lengths:
        kv = KVCacheManager(KVCacheConfig((full, window)))
        between, during = _held(kv, length)
        plain = cdiv(length, _BLOCK_SIZE) * (full.bytes_per_block + window.bytes_per_block)
        share = 1 - between / plain
        print(f"| {length:,} | {between / _MIB:.1f} | {during / _MIB:.1f} | {plain / _MIB:.1f} | {share:.0%} |")


def _held(kv: KVCacheManager, length: int) -> tuple[int, int]:
    """Bytes that a request holds after ``length`` tokens, and while it computes the last of them."""
    request = Request("r", [0] * length, SamplingParams(), max_total_tokens=length + 1)
    for start in range(0, length, _CHUNK):
        count = min(_CHUNK, length - start)
        taken = kv.grow(request, count) if start else kv.admit(request, kv.find_prefix(request), count)
        assert taken is not None, "the cache has room for the longest request"
        during = _bytes(kv)
        request.num_computed_tokens += count
        kv.commit(request)
    return _bytes(kv), during


def _bytes(kv: KVCacheManager) -> int:
    tables = zip(kv.config.groups, kv.block_ids("r"), strict=True)
    return sum(group.bytes_per_block * (len(table) - table.count(0)) for group, table in tables)


if __name__ == "__main__":
    main()
