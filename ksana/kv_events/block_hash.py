"""Block hashes as others see them."""

from __future__ import annotations

_BITS_64 = 8


def external_hash(block_hash: bytes) -> int:
    """The last 64 bits of a block's hash, unsigned and big-endian.

    What subscribers of vLLM's events expect of a SHA-256 hash, and all that most of them can read. Unlike in the cache
    itself, where a collision would show somebody another's text, it would but mislead a router once in 2**64 pairs.
    """
    return int.from_bytes(block_hash[-_BITS_64:], "big")
