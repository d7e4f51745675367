"""The KV cache manager: who holds which blocks, and which tokens need not be computed again."""

from __future__ import annotations

from ksana.kv.block_table import BlockTable
from ksana.kv.capacity import Capacity
from ksana.kv.hashing import BlockHasher
from ksana.kv.observer import KVCacheObserver
from ksana.kv.prefix_cache import PrefixCache, PrefixHit
from ksana.kv.remote_loading import RemoteCacheLoading, RemoteLoadingError
from ksana.types.kv import BlockCopy, BlockCounts, KVCacheConfig, cdiv
from ksana.types.request import Request
from ksana.types.step import BlockIds, BlockTableUpdate


class KVCacheManager:
    """Gives requests the blocks they need, and finds prefixes that earlier requests have left.

    The life of a request here: ``find_prefix`` (free of side effects), ``admit``, then per step ``grow`` before and
    ``commit`` after the computation, at last ``free``. Only committed tokens become findable. A prefix that is loaded
    over several steps comes by :attr:`remote_loading` in place of ``admit``.

    Args:
        config: number of blocks and the groups of layers.
        enable_prefix_caching: if False, nothing is ever findable.
        hash_seed: root of the block hashes, see :class:`BlockHasher`.
        observer: hears what becomes findable, and what no longer is.

    Attributes:
        no_update: what :meth:`grow` returns when the block table stays as it is.
        capacity: counts what requests take at most.
        remote_loading: for asynchronous loads.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool = True,
        hash_seed: str = "ksana",
        observer: KVCacheObserver | None = None,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._cache = PrefixCache(config, observer)
        self._first_pool = self._cache.pool if config.has_full_attention else self._cache.windows[0]
        self._hasher = BlockHasher(config.block_size, hash_seed)
        self._tables: dict[str, BlockTable] = {}
        self._block_copies: list[BlockCopy] = []
        self.no_update = BlockTableUpdate(0, tuple([] for _ in config.groups))
        self.capacity = Capacity(self._cache, config.block_size)
        self.remote_loading = RemoteCacheLoading(self._cache, self._tables, config.block_size, self._register)

    # -- how many blocks there are -----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the first group that could be handed out now."""
        return self._first_pool.num_free_blocks

    @property
    def num_free_cached_blocks(self) -> int:
        """Those of them whose content can be found."""
        return self._first_pool.num_free_cached_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the first group that exist for requests."""
        return self._first_pool.num_usable_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1, of the group that has the least left."""
        pools = [self._first_pool, *self._cache.windows]
        return max(1.0 - pool.num_free_blocks / pool.num_usable_blocks for pool in pools)

    def has_free_blocks(self, count: int) -> bool:
        """True if every group has ``count`` blocks that could be handed out now."""
        return self._cache.has_free_blocks(count)

    def max_new_blocks(self, num_new_tokens: int) -> int:
        """Most blocks of a group that :meth:`grow` takes for so many tokens: a copy of the last one, and new ones."""
        return 1 + cdiv(num_new_tokens, self.block_size)

    def fits_empty(self, counts: BlockCounts) -> bool:
        """True if so many blocks exist."""
        return self.capacity.fits_empty(counts)

    def max_request_tokens(self, limit: int, max_chunk: int) -> int:
        """See :meth:`Capacity.max_request_tokens`."""
        return self.capacity.max_request_tokens(limit, max_chunk)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> BlockCounts:
        """See :meth:`Capacity.peak_blocks`."""
        return self.capacity.peak_blocks(num_tokens, max_chunk)

    def peak_blocks_of_beams(self, count: int, num_shared_tokens: int, num_tokens: int, max_chunk: int) -> BlockCounts:
        """See :meth:`Capacity.peak_blocks_of_beams`."""
        return self.capacity.peak_blocks_of_beams(count, num_shared_tokens, num_tokens, max_chunk)

    # -- the life of a request ---------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's tokens, at least one token left over to be computed."""
        if not self.enable_prefix_caching:
            return PrefixHit([], 0)
        hashes = self._hasher.extend(request)
        bound = min(request.num_tokens - 1, request.max_cached_tokens) // self.block_size
        blocks = self._cache.find(hashes, bound)
        return PrefixHit(blocks, len(blocks) * self.block_size)

    def can_admit(self, hit: PrefixHit, needed: BlockCounts, reserve: int) -> bool:
        """True if a request of ``needed`` blocks, ``hit`` among them, leaves ``reserve`` blocks a group for the others.

        Blocks are allocated chunk by chunk, but a prefill that is started without room for its end would be preempted
        on the way.
        """
        return self.capacity.can_admit(hit, needed, reserve)

    def admit(
        self, request: Request, hit: PrefixHit, num_new_tokens: int, *, num_external_tokens: int = 0
    ) -> BlockIds | None:
        """Give a request without blocks those of ``hit`` and room for ``num_new_tokens`` more.

        Args:
            num_external_tokens: the first of the new tokens, which are not computed but loaded from elsewhere in the
                coming step. Sliding windows get blocks for the end of them only.

        Returns:
            Its block table, one list of ids per group; None, with nothing changed, if there are too few free blocks.
        """
        request_id = request.request_id
        if request_id in self._tables:
            raise self._misuse(request, "admitted")
        total = cdiv(hit.num_tokens + num_new_tokens, self.block_size)
        num_full = (hit.num_tokens + num_external_tokens) // self.block_size
        if not self.capacity.has_room(hit, total, num_full):
            return None
        # The hit first: allocating must not evict what is about to be taken.
        table = self._tables[request_id] = BlockTable(self._cache, hit.blocks)
        table.drop_behind_windows(num_full)
        table.extend(total)
        table.capacity = total * self.block_size
        return table.block_ids()

    def grow(self, request: Request, num_new_tokens: int) -> BlockTableUpdate | None:
        """Make room for ``num_new_tokens`` after the computed ones, and make the place they go to the request's own.

        Returns:
            What changed in its block table, nothing in the common case; None if there are too few free blocks (blocks
            outside a sliding window may have been given back, nothing else has changed).

        Raises:
            RemoteLoadingError: blocks of the request are being loaded.
        """
        total = request.num_computed_tokens + num_new_tokens
        table = self._tables[request.request_id]
        if total <= table.capacity and not table.is_forked:
            return self.no_update
        return self._grow_table(request, table, total)

    def commit(self, request: Request) -> None:
        """The request's ``num_computed_tokens`` tokens are in the cache now.

        Full blocks become findable, and windows give back what they need no longer. To be called at least whenever a
        block has become full.

        Raises:
            RemoteLoadingError: blocks of the request are being loaded.
        """
        table = self._tables[request.request_id]
        if table.is_remote_loading:
            raise self._misuse(request, "committed")
        num_full = request.num_computed_tokens // self.block_size
        self._register(request, table, num_full)
        if table.windows:
            table.drop_behind_windows(num_full)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, in whatever state it is. Does nothing if it has none."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        table.truncate(0)
        if self._block_copies:  # a copy for nobody would spoil what the next owner of its block keeps there
            self._block_copies = [copy for copy in self._block_copies if self._cache.is_used(copy[0], copy[2])]

    def fork(self, parent: Request, child: Request, num_tokens: int) -> BlockIds:
        """Let ``child`` start with the parent's blocks of the first ``num_tokens`` tokens, shared; returns its table.

        They are what the parent has committed. The child may compute the last of them again, but none before it.
        Whoever first writes into the shared last block gets a copy of its own (copy-on-write): see
        :meth:`take_block_copies`.

        Raises:
            RemoteLoadingError: blocks of the parent are being loaded.
        """
        table = self._tables[parent.request_id]
        if table.is_remote_loading or child.request_id in self._tables:
            raise self._misuse(parent, f"forked to {child.request_id}")
        forked = self._tables[child.request_id] = table.fork(cdiv(num_tokens, self.block_size))
        forked.capacity = len(forked.blocks) * self.block_size
        return forked.block_ids()

    def take_block_copies(self) -> list[BlockCopy]:
        """Blocks to copy before the next step writes anything. Clears the list."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def has_blocks(self, request_id: str) -> bool:
        """True if the request has a block table."""
        return request_id in self._tables

    def block_ids(self, request_id: str, first_index: int = 0) -> BlockIds:
        """The block table of a request from an entry on, one list of ids per group; 0 is a hole."""
        return self._tables[request_id].block_ids(first_index)

    def kept_block_ids(self, request_id: str, first_index: int = 0) -> BlockIds:
        """The same with blocks that a sliding window has given back and nobody has taken yet.

        They are what they were until the end of the planning of a step that has not been computed: for those who copy
        content elsewhere.
        """
        return self._tables[request_id].kept_block_ids(first_index)

    # -- the whole cache ---------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns the number of blocks forgotten."""
        return self._cache.forget_all()

    def cached_hashes(self, group_id: int) -> set[bytes]:
        """Hashes of the blocks that can be found in a group. O(blocks)."""
        return self._cache.cached_hashes(group_id)

    def check_integrity(self) -> None:
        """Compare the pools with the block tables; raises AssertionError naming what is wrong. O(blocks)."""
        self._cache.check_integrity(list(self._tables.values()))

    def _register(self, request: Request, table: BlockTable, num_full: int) -> None:
        first = table.num_registered
        if not self.enable_prefix_caching or num_full <= first:
            return
        hashes = self._hasher.extend(request, num_full)
        self._cache.register(request, first, table.blocks[first:num_full], hashes[first:num_full])
        table.num_registered = num_full

    def _grow_table(self, request: Request, table: BlockTable, total: int) -> BlockTableUpdate | None:
        if table.is_remote_loading:
            raise self._misuse(request, "grown")
        first, written = len(table.blocks), request.num_computed_tokens // self.block_size
        table.drop_behind_windows(written)
        total_blocks = max(first, cdiv(total, self.block_size))
        copies = table.is_forked and written < first and table.is_shared(written)
        if not self._cache.has_free_blocks(total_blocks - first + copies):
            return None
        if copies:
            first = written
            self._block_copies += table.unshare(written)
        table.is_forked = False
        table.extend(total_blocks)
        table.capacity = total_blocks * self.block_size
        return BlockTableUpdate(first, table.block_ids(first))

    def _misuse(self, request: Request, done: str) -> RemoteLoadingError | AssertionError:
        table = self._tables[request.request_id]
        if table.is_remote_loading:
            return RemoteLoadingError(f"{request.request_id} is {done} while its blocks are being loaded")
        return AssertionError(f"{request.request_id} is {done} though it has blocks")
