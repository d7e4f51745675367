"""The paged KV cache: blocks, their pool, content hashes, per-group tables. Pure Python, no torch."""

from ksana.kv.block import KVCacheBlock
from ksana.kv.hashing import BlockHasher
from ksana.kv.layout import group_layers
from ksana.kv.manager import KVCacheManager

__all__ = ["BlockHasher", "KVCacheBlock", "KVCacheManager", "group_layers"]
