"""How long a stored prefix is, for all KV cache groups together."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.connectors.block_store import BlockNamespace, BlockStore
from ksana.types.kv import KVCacheConfig


class PrefixLookup:
    """Finds the longest prefix of a request of which a store has all that is needed.

    With full attention that is every block. With a sliding window only the blocks of the last window matter: a prefix
    that ends with block E is usable if the last ``ceil(window / block_size)`` blocks before E are there.

    Attributes:
        prefixes: by group, what the keys of its blocks begin with.
        window_blocks: by group, the blocks of a window; None for full attention.
    """

    def __init__(self, store: BlockStore, namespace: BlockNamespace, kv: KVCacheConfig) -> None:
        self._store = store
        self.prefixes = [namespace.key_prefix(group_id) for group_id in range(len(kv.groups))]
        self.window_blocks = [group.window_blocks for group in kv.groups]

    def num_blocks(self, block_hashes: Sequence[bytes], first: int, end: int) -> int | None:
        """Blocks that can be loaded behind the first ``first``, which the cache has, and not beyond ``end``.

        Returns:
            None if the store does not know yet.
        """
        for prefix, window in zip(self.prefixes, self.window_blocks, strict=True):
            if window is None and first < end:
                count = self._store.contains([prefix + hash_.hex() for hash_ in block_hashes[first:end]])
                if count is None:
                    return None
                end = first + count
        return self._last_endpoint(block_hashes, first, end)

    def _last_endpoint(self, block_hashes: Sequence[bytes], first: int, end: int) -> int | None:
        """The same where full attention allows every end up to ``end``."""
        last = end
        windows: list[tuple[str, int, list[str]]] = [
            (prefix, window, [])
            for prefix, window in zip(self.prefixes, self.window_blocks, strict=True)
            if window is not None
        ]
        is_settled = False
        while not is_settled and first < end:
            is_settled = True
            for prefix, window, keys in windows:
                # Backwards: the last one that is missing is the first to be found. Each key is made once.
                start = max(first, end - window)
                keys += [prefix + hash_.hex() for hash_ in block_hashes[start : last - len(keys)][::-1]]
                needed = keys[last - end : last - start]
                count = self._store.contains(needed)
                if count is None:
                    return None
                if count < len(needed):
                    end -= count + 1
                    is_settled = False
        return max(end - first, 0)
