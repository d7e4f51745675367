"""What a store of blocks must do, and what its keys are made of."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ksana.types.kv import KVCacheConfig
from ksana.types.model import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    BlockBuffers = Sequence[np.ndarray]
    """A block's memory: one contiguous uint8 array for each layer of its group, in order."""


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What two engines must have in common to read each other's blocks, beside the tokens.

    Attributes:
        model: what the keys and values depend on; see :func:`describe_model`.
        layout: name of the backend's memory layout of a block.
        tp_rank, tp_size: which part of the heads the blocks hold.
        lora_name: adapter that computed them; empty for none.
    """

    model: str
    layout: str
    tp_rank: int = 0
    tp_size: int = 1
    lora_name: str = ""

    def key(self, block_hash: bytes, group_id: int) -> str:
        """The name of a block in a store: equal in every process and after every restart, safe as a file's name."""
        return self.key_prefix(group_id) + block_hash.hex()

    def key_prefix(self, group_id: int) -> str:
        """What the keys of all blocks of a KV cache group begin with; the hexadecimal block hash follows."""
        return f"{self.prefix}{group_id}-"

    @property
    def prefix(self) -> str:
        """What all keys of the namespace begin with."""
        return f"{self.digest}-"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for all fields."""
        text = "\0".join((self.model, self.layout, f"{self.tp_rank}/{self.tp_size}", self.lora_name))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class BlockStore(ABC):
    """Keeps copies of blocks under keys. Threads of a connector call it, several at a time.

    Where room ends, the longest unused blocks go first. No method raises for what a store does by its
    nature (a miss, no room, a peer that is gone): those are answers.
    """

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> int | None:
        """How many of the first ``keys``, without a gap, are stored; None if that is not known yet (ask again).

        Called on the engine's thread, so it must not block; a store behind a network looks up in the background.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        """Copy blocks into memory. False for each that is missing or damaged, whose buffers then hold anything."""

    @abstractmethod
    def put(self, keys: Sequence[str], buffers: Sequence[BlockBuffers]) -> list[bool]:
        """Copy blocks from memory, replacing nothing. False for each for which there was no room.

        One that takes longer than some seconds may see the memory change, and store a mixture: :meth:`get` must find
        that damaged.
        """

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Which blocks are stored; those have been used just now, the last of ``keys`` latest. May block.

        What is about to be saved is asked for here first, so that nothing is copied twice. A store for which asking
        costs as much as storing leaves this as it is: nothing is known to be there.
        """
        return [False] * len(keys)

    def pin(self, keys: Sequence[str]) -> list[str]:
        """Keep blocks until :meth:`unpin`; returns the keys of those that are kept: none, if a store promises nothing.

        Called on the engine's thread. A block may be pinned several times.
        """
        del keys
        return []

    def unpin(self, keys: Sequence[str]) -> None:
        """Return pins, of keys that :meth:`pin` has returned."""

    def clear(self) -> None:
        """Forget everything of this engine's namespace.

        Called on the engine's thread: what takes long goes on in the background, and meanwhile nothing is found.
        """

    def close(self) -> None:
        """Give back memory, files and connections; at most a few seconds."""


def describe_model(model: ModelConfig, kv: KVCacheConfig, weights: str) -> str:
    """The text that stands for a model in :class:`BlockNamespace`.

    Args:
        weights: digest of the weight files' names, sizes and, where cheap, content: another checkpoint of the same
            shape has other keys and values.
    """
    # Everything about the model, since what changes keys and values is not only its weights: scales, rotary embedding.
    shape = replace(model, name="", generation_defaults={})
    groups = ";".join(f"{group.spec}:{group.layer_indices}" for group in kv.groups)
    return "\0".join((weights, repr(shape), groups))
