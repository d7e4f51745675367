"""The KV cache manager: who holds which blocks, and which tokens need not be computed again."""

from __future__ import annotations

from dataclasses import dataclass

from ksana.kv.block import KVCacheBlock
from ksana.kv.block_pool import BlockPool
from ksana.kv.groups import BlockTables, create_block_tables
from ksana.kv.hashing import BlockHasher
from ksana.types.kv import KVCacheConfig, cdiv
from ksana.types.request import Request
from ksana.types.step import BlockIds, BlockTableUpdate


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix: blocks per group (holes as null blocks) and the tokens they cover, a multiple of block_size."""

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int


class KVCacheManager:
    """Gives requests the blocks they need, and finds prefixes that earlier requests have left.

    The life of a request here: ``find_prefix`` (free of side effects), ``admit``, then per step ``grow`` before and
    ``commit`` after the computation, at last ``free``. Only committed tokens become findable.

    Args:
        config: number of blocks and the groups of layers.
        enable_prefix_caching: if False, nothing is ever findable.
        hash_seed: root of the block hashes, see :class:`BlockHasher`.

    Attributes:
        no_update: what :meth:`grow` returns when the block table stays as it is.
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool = True, hash_seed: str = "ksana") -> None:
        self.config = config
        self.block_size = config.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self._hasher = BlockHasher(config.block_size, hash_seed)
        self._groups = [create_block_tables(i, group.spec, self.pool) for i, group in enumerate(config.groups)]
        self._capacity: dict[str, int] = {}  # tokens that the request's blocks have room for
        self._forked: set[str] = set()  # requests whose last block may be shared
        self._block_copies: list[tuple[int, int]] = []
        self.no_update = BlockTableUpdate(0, tuple([] for _ in self._groups))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_usable_blocks

    def max_request_tokens(self, limit: int, max_chunk: int) -> int:
        """Longest request (at most ``limit`` tokens) that fits the empty cache if computed ``max_chunk`` at a time."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_blocks(middle, max_chunk) <= self.pool.num_usable_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks, over all groups, that a request of that size holds at any moment."""
        chunk = min(max_chunk, num_tokens)
        return sum(group.peak_blocks(num_tokens, chunk) for group in self._groups)

    def peak_blocks_of_beams(self, count: int, num_shared_tokens: int, num_tokens: int, max_chunk: int) -> int:
        """Like :meth:`peak_blocks`, for ``count`` requests of that size together, which begin with the same tokens."""
        chunk = min(max_chunk, num_tokens)
        return sum(
            count * group.peak_blocks(num_tokens, chunk) - (count - 1) * group.num_lasting_blocks(num_shared_tokens)
            for group in self._groups
        )

    def max_new_blocks(self, num_new_tokens: int) -> int:
        """Most blocks that :meth:`grow` takes for so many tokens: a copy of the last one a group, and new ones."""
        return len(self._groups) * (1 + cdiv(num_new_tokens, self.block_size))

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's tokens, at least one token left over to be computed.

        Every group must have it. A group that has less lowers the bound for all; full attention comes first, and its
        answer for a lower bound is a mere cut. The bound only falls, so this ends.
        """
        if not self.enable_prefix_caching:
            return PrefixHit(self._no_blocks(), 0)
        hashes = self._hasher.extend(request)
        bound = min(request.num_tokens - 1, request.max_cached_tokens) // self.block_size
        while bound > 0:
            hits = []
            for group in self._groups:
                hit = group.find_longest_hit(hashes, bound)
                hits.append(hit)
                if len(hit) < bound:
                    break
            else:
                return PrefixHit(tuple(hits), bound * self.block_size)
            bound = len(hits[-1])
        return PrefixHit(self._no_blocks(), 0)

    def can_admit(self, hit: PrefixHit, needed: int, reserve: int) -> bool:
        """True if a request of ``needed`` blocks, ``hit`` among them, leaves ``reserve`` blocks for the others.

        Blocks are allocated chunk by chunk, but a prefill that is started without room for its end would be preempted
        on the way.
        """
        shared = sum(1 for blocks in hit.blocks for block in blocks if block.ref_cnt > 0)
        return needed - shared + reserve <= self.pool.num_free_blocks

    def admit(self, request: Request, hit: PrefixHit, num_new_tokens: int) -> BlockIds | None:
        """Give a request without blocks those of ``hit`` and room for ``num_new_tokens`` more.

        Returns:
            Its block table, one list of ids per group; None, with nothing changed, if there are too few free blocks.
        """
        request_id = request.request_id
        assert request_id not in self._capacity, f"{request_id} already has blocks"
        total = hit.num_tokens + num_new_tokens
        needed = sum(
            group.num_blocks_to_allocate(request_id, total, blocks)
            for group, blocks in zip(self._groups, hit.blocks, strict=True)
        )
        if needed > self.pool.num_free_blocks:
            return None
        # All hits first: allocating for one group must not evict what another is about to take.
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            group.add_hit(request_id, blocks)
        for group in self._groups:
            group.grow(request_id, total)
        self._set_capacity(request_id, total)
        return self.block_ids(request_id)

    def grow(self, request: Request, num_new_tokens: int) -> BlockTableUpdate | None:
        """Make room for ``num_new_tokens`` after the computed ones, and make the place they go to the request's own.

        Returns:
            What changed in its block table, nothing in the common case; None if there are too few free blocks (blocks
            outside a sliding window may have been given back, nothing else has changed).
        """
        total = request.num_computed_tokens + num_new_tokens
        if total <= self._capacity[request.request_id] and request.request_id not in self._forked:
            return self.no_update
        return self._grow_tables(request, total)

    def commit(self, request: Request) -> None:
        """The request's ``num_computed_tokens`` tokens are in the cache now: full blocks become findable."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        hashes = self._hasher.extend(request, num_full)
        for group in self._groups:
            group.register_full(request.request_id, hashes, num_full)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request. Does nothing if it has none."""
        if self._capacity.pop(request.request_id, None) is None:
            return
        self._forked.discard(request.request_id)
        for group in self._groups:
            group.free(request.request_id)
        if self._block_copies:  # a copy for nobody would spoil what the next owner of its block keeps there
            self._block_copies = [pair for pair in self._block_copies if self.pool.blocks[pair[1]].ref_cnt > 0]

    def fork(self, parent: Request, child: Request, num_tokens: int) -> BlockIds:
        """Let ``child`` start with the parent's blocks of the first ``num_tokens`` tokens, shared; returns its table.

        Whoever first writes into the shared last block gets a copy of its own (copy-on-write): see
        :meth:`take_block_copies`.
        """
        num_blocks = cdiv(num_tokens, self.block_size)
        for group in self._groups:
            group.fork(parent.request_id, child.request_id, num_blocks)
        self._set_capacity(child.request_id, num_tokens)
        self._forked.update((parent.request_id, child.request_id))
        return self.block_ids(child.request_id)

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy before the next step writes anything. Clears the list."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def block_ids(self, request_id: str) -> BlockIds:
        """The block table of a request, one list of ids per group."""
        return self._block_ids_from(request_id, 0)

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns the number of blocks forgotten."""
        return self.pool.clear_cached()

    def check_integrity(self) -> None:
        """Compare the pool with the block tables; raises AssertionError naming what is wrong. O(blocks)."""
        counts: dict[int, int] = {}
        assert self._forked <= self._capacity.keys(), "a forked request is remembered after its end"
        for group in self._groups:
            assert group.tables.keys() == self._capacity.keys(), "a group has tables of other requests"
            for table in group.tables.values():
                for block in table:
                    if block is not self.pool.null_block:
                        counts[block.block_id] = counts.get(block.block_id, 0) + 1
        self.pool.check_integrity(counts)

    def _grow_tables(self, request: Request, total: int) -> BlockTableUpdate | None:
        request_id = request.request_id
        first = len(self._groups[0].tables[request_id])
        shared: list[BlockTables] = []
        written = request.num_computed_tokens // self.block_size
        if request_id in self._forked and written < first:
            shared = [group for group in self._groups if group.is_shared(request_id, written)]
            first = written if shared else first
        for group in self._groups:
            group.drop_skippable(request_id, request.num_computed_tokens)
        needed = sum(group.num_blocks_to_allocate(request_id, total, []) for group in self._groups)
        if needed + len(shared) > self.pool.num_free_blocks:
            return None
        self._block_copies.extend(group.unshare(request_id, first) for group in shared)
        self._forked.discard(request_id)
        for group in self._groups:
            group.grow(request_id, total)
        self._set_capacity(request_id, max(total, self._capacity[request_id]))
        return BlockTableUpdate(first, self._block_ids_from(request_id, first))

    def _set_capacity(self, request_id: str, num_tokens: int) -> None:
        self._capacity[request_id] = cdiv(num_tokens, self.block_size) * self.block_size

    def _block_ids_from(self, request_id: str, first: int) -> BlockIds:
        return tuple([block.block_id for block in group.tables[request_id][first:]] for group in self._groups)

    def _no_blocks(self) -> tuple[list[KVCacheBlock], ...]:
        return tuple([] for _ in self._groups)
