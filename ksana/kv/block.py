"""One block of the KV cache, and the queue of blocks that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator


class KVCacheBlock:
    """Bookkeeping of one physical block.

    Attributes:
        block_id: index into the cache tensors.
        ref_cnt: requests whose block table holds it. A block with 0 is in the free queue, whatever it still contains.
        block_hash: of its content, while it is full, committed and findable; cleared when it is evicted.
        previous, next: links of the free queue; None while in use.
    """

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.previous: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: no allocation, and O(1) removal from the middle.

    The front is reused first. Two sentinels spare every special case at the ends.
    """

    __slots__ = ("_head", "_tail", "num_blocks")

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the back, to be reused last."""
        assert self._tail.previous is not None
        self._link(self._tail.previous, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the front, to be reused next."""
        assert self._head.next is not None
        self._link(self._head, block, self._head.next)

    def popleft(self) -> KVCacheBlock:
        """Take the front block. Raises IndexError if the queue is empty."""
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("no free KV cache block")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out from wherever it stands."""
        assert block.previous is not None and block.next is not None, f"{block} is not in the free queue"
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = None
        self.num_blocks -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.previous is None and block.next is None, f"{block} is already in the free queue"
        block.previous, block.next = before, after
        before.next = after.previous = block
        self.num_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next
