"""Static facts about a model's KV cache: what one layer stores, and which layers share block tables."""

from __future__ import annotations

from dataclasses import dataclass

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


BlockCopy = tuple[int, int, int]
"""KV cache group, source block, destination block."""

BlockCounts = tuple[int, ...]
"""Blocks wanted of each of a cache's pools. What the pools are is the cache manager's affair."""


def cdiv(numerator: int, denominator: int) -> int:
    """Integer division, rounded up: the blocks that so many tokens take."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token. A block holds ``block_size`` tokens of keys and of values.

    Attributes:
        dtype: of the stored keys and values, by torch's name.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of one layer takes, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to every earlier one: all blocks of a request stay."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token attends to the last ``sliding_window`` tokens, itself among them: older blocks are given back."""

    sliding_window: int

    @property
    def window_blocks(self) -> int:
        """Full blocks that a window takes if it ends at a block's edge."""
        return cdiv(self.sliding_window, self.block_size)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec, and therefore one block table per request.

    A block id of the group means the same place in the cache tensor of each of its layers, and nothing in those of
    other groups: every group numbers its own blocks.

    Attributes:
        num_blocks: blocks in each of the tensors. Block 0 is the null block, which no request gets.
    """

    spec: KVCacheSpec
    layer_indices: tuple[int, ...]
    num_blocks: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers of the group."""
        return len(self.layer_indices) * self.spec.bytes_per_block

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query looks at, itself included; None for all."""
        return self.spec.sliding_window if isinstance(self.spec, SlidingWindowSpec) else None

    @property
    def window_blocks(self) -> int | None:
        """See :attr:`SlidingWindowSpec.window_blocks`; None for all."""
        return self.spec.window_blocks if isinstance(self.spec, SlidingWindowSpec) else None


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The whole cache.

    The sequence of blocks that a request's tokens fill is that of full attention. Layers with a sliding window keep
    only some of them, in blocks of their own: their groups have fewer.

    Attributes:
        groups: all layers of full attention, if there are any, then one group for each sliding window.
        num_logical_blocks: of a model whose layers all have a window. They stand for blocks of full attention, order
            the windows' blocks, and take no memory. The null block is among them. Of no meaning for other models.
    """

    groups: tuple[KVCacheGroup, ...]
    num_logical_blocks: int = 0

    @property
    def has_full_attention(self) -> bool:
        """True if some layer looks at all tokens; the first group is then that of those layers."""
        return self.groups[0].sliding_window is None

    @property
    def num_blocks(self) -> int:
        """Blocks of full attention, with or without memory, the null block included."""
        return self.groups[0].num_blocks if self.has_full_attention else self.num_logical_blocks

    @property
    def window_groups(self) -> tuple[KVCacheGroup, ...]:
        """Groups with a sliding window."""
        return self.groups[1:] if self.has_full_attention else self.groups

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in every group."""
        return self.groups[0].spec.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all cache tensors."""
        return sum(group.num_blocks * group.bytes_per_block for group in self.groups)
