"""The paged KV cache: blocks, their pool, content hashes, per-group tables. Pure Python, no torch."""

from ksana.kv.block import KVCacheBlock
from ksana.kv.hashing import BlockHasher
from ksana.kv.layout import group_layers
from ksana.kv.manager import KVCacheManager
from ksana.kv.remote_loading import RemoteCacheLoading, RemoteLoadingError
from ksana.kv.swa_cache_manager import SWACacheManager

__all__ = [
    "BlockHasher",
    "KVCacheBlock",
    "KVCacheManager",
    "RemoteCacheLoading",
    "RemoteLoadingError",
    "SWACacheManager",
    "group_layers",
]
