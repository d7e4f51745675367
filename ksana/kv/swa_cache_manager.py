"""Blocks of the layers with a sliding window: at most one for each full-attention block, and far fewer of them.

"FA" is short for full attention, "SWA" for sliding-window attention, here and in the names of the original.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SWABlock:
    """Bookkeeping of one physical block.

    Attributes:
        block_id: index into the cache tensors of the window's layers.
        fa_block_id: the FA block whose tokens it keeps; 0 while it is idle.
        prefix_fa_block_num: FA blocks before that one in its sequence.
        hit_count: cached prefixes that were taken over with it.
        num_users: requests whose window it is in.
        is_content_fixed: full, computed and findable. Otherwise it is being written, or is of use to its users alone.
        ticket: of its valid entry among those that may be evicted; 0 for none.
    """

    __slots__ = (
        "block_id",
        "fa_block_id",
        "hit_count",
        "is_content_fixed",
        "num_users",
        "prefix_fa_block_num",
        "ticket",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.clear()

    def clear(self) -> None:
        """Make it idle."""
        self.fa_block_id = 0
        self.prefix_fa_block_num = 0
        self.hit_count = 0
        self.num_users = 0
        self.is_content_fixed = False
        self.ticket = 0

    def __repr__(self) -> str:
        return (
            f"SWABlock({self.block_id} for FA block {self.fa_block_id}, users={self.num_users}, "
            f"hits={self.hit_count}, fixed={self.is_content_fixed})"
        )


class SWACacheManager:
    """The blocks of one sliding window (the original's ``SWACacheManager``). All are addressed by their FA block.

    A block is idle, in use, or *reclaimable*: nobody's window holds it any more, but its content is fixed and can be
    found, so it stays until its place is needed. Who needs a block gets an idle one; if there is none, the reclaimable
    block that is worth least is evicted: of those with the fewest hits, the one with the fewest FA blocks before it,
    since that spares the least work; of equal ones, the one that has been reclaimable for longest. A block whose
    content is not fixed is never evicted: it is idle as soon as nobody uses it.

    Args:
        window_blocks: ceil(window / block size), W_blocks of the matching rule.
        num_blocks: in the cache tensors, the null block included.
        on_evicted: called with the FA block's id when its fixed block is evicted for another one.
    """

    def __init__(self, window_blocks: int, num_blocks: int, on_evicted: Callable[[int], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a sliding window needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.window_blocks = window_blocks
        self._on_evicted = on_evicted
        self._blocks = [SWABlock(block_id) for block_id in range(num_blocks)]
        self._idle = self._blocks[:0:-1]  # a stack; block 0 is the null block
        self._by_fa_block: dict[int, SWABlock] = {}
        self._candidates: list[tuple[int, int, int, SWABlock]] = []  # a heap; entries with an old ticket are void
        self._num_reclaimable = 0
        self._num_tickets = 0

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that exist for requests."""
        return len(self._blocks) - 1

    @property
    def num_free_cached_blocks(self) -> int:
        """Blocks that nobody uses, and whose content can be found."""
        return self._num_reclaimable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now: idle and reclaimable ones."""
        return len(self._idle) + self._num_reclaimable

    def is_valid(self, fa_block_id: int) -> bool:
        """True if the FA block's tokens can be found here too."""
        block = self._by_fa_block.get(fa_block_id)
        return block is not None and block.is_content_fixed

    def is_used(self, fa_block_id: int) -> bool:
        """True if somebody's window holds the FA block's tokens."""
        block = self._by_fa_block.get(fa_block_id)
        return block is not None and block.num_users > 0

    def is_block_used(self, block_id: int) -> bool:
        """The same, by the physical block."""
        return self._blocks[block_id].num_users > 0

    def block_id_of(self, fa_block_id: int) -> int:
        """The physical block that keeps the FA block's tokens. Raises KeyError if there is none."""
        return self._by_fa_block[fa_block_id].block_id

    def allocate(self, fa_block_id: int, prefix_fa_block_num: int) -> int:
        """Give an FA block without one a block, in use by one request. Raises IndexError if there is none left.

        Returns:
            The physical block's id.
        """
        assert fa_block_id not in self._by_fa_block, f"FA block {fa_block_id} has a block already"
        block = self._idle.pop() if self._idle else self._evict()
        block.fa_block_id = fa_block_id
        block.prefix_fa_block_num = prefix_fa_block_num
        block.num_users = 1
        self._by_fa_block[fa_block_id] = block
        return block.block_id

    def set_reclaimable(self, fa_block_id: int, reclaimable: bool) -> None:
        """The original's ``SetReclaimable``: one request less (True) or more (False) needs the block.

        With the last request the block becomes reclaimable if its content is fixed, and idle if it is not.
        """
        block = self._by_fa_block[fa_block_id]
        if not reclaimable:
            if block.ticket:
                self._withdraw(block)
            block.num_users += 1
            return
        assert block.num_users > 0, f"{block} given back more often than taken"
        block.num_users -= 1
        if block.num_users == 0:
            if block.is_content_fixed:
                self._offer(block)
            else:
                self._make_idle(block)

    def increment_hit_count(self, fa_block_id: int) -> None:
        """The original's ``IncrementHitCount``: the block was part of a cached prefix that was taken over."""
        block = self._by_fa_block[fa_block_id]
        block.hit_count += 1
        if block.ticket:
            self._withdraw(block)
            self._offer(block)

    def fix_content(self, fa_block_id: int) -> bool:
        """The FA block is full, computed and findable (``is_content_fixed``). False if it has no block here."""
        block = self._by_fa_block.get(fa_block_id)
        if block is None:
            return False
        block.is_content_fixed = True
        return True

    def forget_content(self, fa_block_id: int) -> bool:
        """The FA block can no longer be found. A block that nobody uses becomes idle. False if there was none fixed."""
        block = self._by_fa_block.get(fa_block_id)
        if block is None or not block.is_content_fixed:
            return False
        block.is_content_fixed = False
        if block.ticket:
            self._withdraw(block)
            self._make_idle(block)
        return True

    def check_integrity(self, num_users: dict[int, int]) -> None:
        """Compare with the truth. O(blocks): for tests and idle moments.

        Args:
            num_users: of each FA block, counted from the requests' windows.

        Raises:
            AssertionError: saying which block is wrong.
        """
        idle = {block.block_id for block in self._idle}
        assert len(idle) == len(self._idle), "a block is idle twice"
        offered = {entry[3].block_id for entry in self._candidates if entry[2] == entry[3].ticket}
        assert len(offered) == self._num_reclaimable, f"{self._num_reclaimable} for {len(offered)} reclaimable blocks"
        for block in self._blocks[1:]:
            kept = self._by_fa_block.get(block.fa_block_id)
            assert (kept is block) != (block.block_id in idle), f"{block}: lost, or kept while idle"
            assert block.num_users == num_users.get(block.fa_block_id, 0), f"{block}: used by others"
            reclaimable = block.num_users == 0 and block.is_content_fixed
            assert (block.block_id in offered) == reclaimable, f"{block}: offered, or not, against its state"
            assert reclaimable or block.num_users > 0 or block.block_id in idle, f"{block}: of no use, but not idle"

    def _offer(self, block: SWABlock) -> None:
        """Put a block that nobody uses among those that may be evicted."""
        self._num_tickets += 1
        self._num_reclaimable += 1
        block.ticket = self._num_tickets
        entry = (block.hit_count, block.prefix_fa_block_num, block.ticket, block)
        if len(self._candidates) <= 2 * self._num_reclaimable + 64:
            heapq.heappush(self._candidates, entry)
        else:  # mostly void entries: start afresh, so that they stay few
            self._candidates = [e for e in self._candidates if e[2] == e[3].ticket]
            self._candidates.append(entry)
            heapq.heapify(self._candidates)

    def _withdraw(self, block: SWABlock) -> None:
        """Void the block's entry."""
        block.ticket = 0
        self._num_reclaimable -= 1

    def _evict(self) -> SWABlock:
        while self._candidates:
            _, _, ticket, block = heapq.heappop(self._candidates)
            if ticket != block.ticket:
                continue
            if self._on_evicted is not None:
                self._on_evicted(block.fa_block_id)
            self._num_reclaimable -= 1
            del self._by_fa_block[block.fa_block_id]
            block.clear()
            return block
        raise IndexError("no idle or reclaimable block of the sliding window")

    def _make_idle(self, block: SWABlock) -> None:
        del self._by_fa_block[block.fa_block_id]
        block.clear()
        self._idle.append(block)
