"""Static facts about a model's KV cache: what one layer stores, and which layers share block tables."""

from __future__ import annotations

from dataclasses import dataclass

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


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


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec, and therefore one block table per request.

    A physical block id means, in group g, the same place in the cache tensors of each of g's layers.
    """

    spec: KVCacheSpec
    layer_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The whole cache: ``num_blocks`` blocks in one pool that all groups draw from."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in every group."""
        return self.groups[0].spec.block_size

    @property
    def num_tensors(self) -> int:
        """Cache tensors needed: the j-th layer of every group lives in tensor j, in blocks of its own group."""
        return max(len(group.layer_indices) for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one pool block takes over all cache tensors."""
        return self.num_tensors * max(group.spec.bytes_per_block for group in self.groups)
