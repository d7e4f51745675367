"""Chained content hashes of full blocks.

Each hash covers the tokens of its block and, through the hash before it, everything earlier. The root is fixed by
configuration, so equal prefixes have equal hashes in every process and after every restart: what KV connectors and
routers need. SHA-256, because a collision would hand one user another user's context.
"""

from __future__ import annotations

import hashlib
import sys
from array import array

from ksana.types.request import Request


class BlockHasher:
    """Computes block hashes.

    Args:
        block_size: tokens per block; part of the root, since blocks of another size are other blocks.
        root_seed: any text; processes that shall share a cache use the same.
    """

    def __init__(self, block_size: int, root_seed: str) -> None:
        self.block_size = block_size
        self._root = hashlib.sha256(f"{root_seed}\0{block_size}".encode()).digest()

    def extend(self, request: Request, num_blocks: int | None = None) -> list[bytes]:
        """Bring ``request.block_hashes`` up to its full blocks (the first ``num_blocks`` of them) and return it."""
        hashes = request.block_hashes
        size = self.block_size
        wanted = request.num_tokens // size if num_blocks is None else num_blocks
        if len(hashes) >= wanted:
            return hashes
        parent = hashes[-1] if hashes else self._root_of(request)
        packed = _pack(request.all_token_ids[len(hashes) * size : wanted * size])
        bytes_per_block = len(packed) // (wanted - len(hashes))
        for start in range(0, len(packed), bytes_per_block):
            parent = hashlib.sha256(parent + packed[start : start + bytes_per_block]).digest()
            hashes.append(parent)
        return hashes

    def _root_of(self, request: Request) -> bytes:
        """Requests with a salt or with embeddings in place of tokens live in chains of their own."""
        if not request.cache_salt and not request.embeddings:
            return self._root
        digest = hashlib.sha256(self._root)
        digest.update(hashlib.sha256(request.cache_salt.encode("utf-8", "surrogatepass")).digest())
        for embedding in request.embeddings:
            digest.update(f"{embedding.position}:{embedding.rows.shape}:{embedding.rows.dtype}".encode())
            digest.update(embedding.rows.tobytes())
        return digest.digest()


def _pack(token_ids: list[int]) -> bytes:
    """Tokens as little-endian unsigned 32-bit integers, the same bytes on every machine."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
