"""What the scheduler side of a store's connector asks of its worker side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ksana.types.kv_transfer import ConnectorMetadata


@dataclass(slots=True)
class BlockList:
    """Blocks of the cache and their keys in the store, one entry each in three lists of equal length."""

    keys: list[str] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def append(self, key: str, group_id: int, block_id: int) -> None:
        """One block more."""
        self.keys.append(key)
        self.group_ids.append(group_id)
        self.block_ids.append(block_id)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> BlockList:
        return BlockList(self.keys[part], self.group_ids[part], self.block_ids[part])

    def select(self, wanted: list[bool]) -> BlockList:
        """Those blocks whose entry is True."""
        chosen = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        lists = (self.keys, self.group_ids, self.block_ids)
        return BlockList(*([values[index] for index in chosen] for values in lists))  # type: ignore[arg-type]

    def batches(self, size: int) -> Iterator[BlockList]:
        """The same in pieces of at most ``size`` blocks."""
        return (self[start : start + size] for start in range(0, len(self), size))


@dataclass(slots=True)
class Load:
    """Blocks to copy from the store.

    Attributes:
        is_async: the request waits until all of them are there, and others go on; else the step waits.
        pinned: keys whose pins are to be returned at the end.
    """

    request_id: str
    blocks: BlockList
    is_async: bool
    pinned: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Save:
    """Blocks to copy to the store.

    Attributes:
        is_swap: they go to places that are reserved for them.
    """

    request_id: str
    blocks: BlockList
    is_swap: bool = False


@dataclass(slots=True)
class StoreMetadata(ConnectorMetadata):
    """The work of one step.

    Attributes:
        preempted: requests whose blocks are about to be written by others.
        used_keys: stored blocks that have been used, the last one latest.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    used_keys: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.loads or self.saves or self.preempted or self.used_keys)
