"""Paged attention on torch's fused CPU attention.

Once per step the batch is split into parts, each of which a layer runs with one fused call:

- decode parts: requests with one new token and contexts of similar length, gathered into one padded batch;
- prefill parts for requests with more tokens; without context they read the batch's own keys and values and do not
  touch the cache at all.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F

from ksana.kernels.batch import AttentionBatch
from ksana.kernels.reference import causal_mask
from ksana.kernels.weights import AttentionWeights
from ksana.types.kv import cdiv

_MAX_PADDING = 1.5
"""A decode part holds contexts of at most this ratio, longest to shortest: what padding may cost."""

_MAX_MASKED_QUERIES = 512
"""Queries of a prefill part whose mask is a tensor."""


class CPUAttentionMetadata:
    """The parts of a step's batch for one KV cache group, and the batch itself for what the parts cannot do."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.slot_mapping = torch.from_numpy(batch.slot_mapping)
        self.parts: list[DecodePart | PrefillPart] = []
        query_lens = np.diff(batch.query_starts)
        lengths = batch.context_lens + query_lens
        first_blocks = _first_visible_blocks(batch)
        for row in np.flatnonzero(query_lens > 1):
            self.parts.extend(_prefill_parts(batch, int(row)))
        decode = np.flatnonzero(query_lens == 1)
        # What a decoding request reads: whole blocks from the first that its window touches.
        spans = lengths[decode] - first_blocks[decode] * batch.block_size
        order = np.argsort(spans, kind="stable")
        for group in _split_by_length(spans[order]):
            rows = decode[order[group]]
            self.parts.append(DecodePart(batch, rows, first_blocks[rows], lengths[rows]))


class DecodePart:
    """Requests with one new token each."""

    def __init__(self, batch: AttentionBatch, rows: np.ndarray, first_blocks: np.ndarray, lengths: np.ndarray) -> None:
        size = batch.block_size
        spans = lengths - first_blocks * size
        num_blocks = cdiv(int(spans.max()), size)
        columns = first_blocks[:, None] + np.arange(num_blocks)
        in_table = columns * size < lengths[:, None]
        columns = np.minimum(columns, batch.block_tables.shape[1] - 1)
        blocks = np.where(in_table, batch.block_tables[rows[:, None], columns], 0)
        self._count = len(rows)
        self._blocks = torch.from_numpy(blocks.reshape(-1))
        self._queries = torch.from_numpy(batch.query_starts[rows])
        # One request is cut to its exact length; several are padded to the longest, and masked.
        self._span = int(spans.max()) if self._count == 1 else num_blocks * size
        hidden = np.arange(self._span) >= spans[:, None]
        if batch.sliding_window is not None:
            starts = lengths - batch.sliding_window - first_blocks * size
            hidden |= np.arange(self._span) < starts[:, None]
        self._hidden = torch.from_numpy(np.flatnonzero(hidden)) if hidden.any() else None
        self._mask = torch.from_numpy(~hidden)[:, None, None, :] if hidden.any() else None

    def run(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        output: torch.Tensor,
        weights: AttentionWeights,
    ) -> None:
        """Attend, and write the part's rows of ``output``."""
        kv_heads, size = weights.num_kv_heads, weights.head_size
        gathered = _read(cache, self._blocks, query).view(self._count, -1, 2 * kv_heads, size)[:, : self._span]
        if self._hidden is not None:
            # Stale content of a reused block may be NaN, and NaN times a weight of zero is NaN.
            gathered.reshape(-1, 2 * kv_heads, size).index_fill_(0, self._hidden, 0)
        keys, values = gathered[:, :, :kv_heads].transpose(1, 2), gathered[:, :, kv_heads:].transpose(1, 2)
        # The query heads that share a key head stand in the place of query positions: no copies of the keys.
        grouped = query.index_select(0, self._queries).view(self._count, kv_heads, -1, size)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask, scale=weights.scale * weights.kv_scale
        )
        output.index_copy_(0, self._queries, attended.reshape(self._count, -1, size))


class PrefillPart:
    """Consecutive new tokens of one request, from ``first`` to before ``last`` (rows of the whole batch)."""

    def __init__(self, batch: AttentionBatch, row: int, first: int, last: int) -> None:
        start = int(batch.query_starts[row])
        context = int(batch.context_lens[row])
        position, end = context + first - start, context + last - start
        seen_from = 0 if batch.sliding_window is None else max(0, position - batch.sliding_window + 1)
        self._queries = slice(first, last)
        self._mask: torch.Tensor | None = None
        self._blocks: torch.Tensor | None = None
        if context > 0:
            first_block = seen_from // batch.block_size
            seen_from = first_block * batch.block_size
            blocks = batch.block_tables[row, first_block : cdiv(end, batch.block_size)]
            self._blocks = torch.from_numpy(blocks)
            self._keys = slice(0, end - seen_from)
        else:
            self._keys = slice(start + seen_from, start + end)
        if position > 0 or (batch.sliding_window is not None and end > batch.sliding_window):
            self._mask = causal_mask(position, last - first, batch.sliding_window)[:, seen_from:]

    def run(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        output: torch.Tensor,
        weights: AttentionWeights,
    ) -> None:
        """Attend, and write the part's rows of ``output``."""
        if self._blocks is not None:
            kv = _read(cache, self._blocks, query).flatten(0, 1)
        visible = kv[self._keys]
        attended = F.scaled_dot_product_attention(
            query[self._queries].transpose(0, 1)[None],
            visible[:, : weights.num_kv_heads].transpose(0, 1)[None],
            visible[:, weights.num_kv_heads :].transpose(0, 1)[None],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=weights.scale * weights.kv_scale,
            enable_gqa=True,
        )
        output[self._queries] = attended[0].transpose(0, 1)


def _read(cache: torch.Tensor, blocks: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Whole blocks, in the query's dtype: [len(blocks), block_size, 2 * num_kv_heads, head_size]."""
    return cache.index_select(0, blocks).to(query.dtype)


def _prefill_parts(batch: AttentionBatch, row: int) -> list[PrefillPart]:
    """A prompt without context is one part, masked by the kernel itself.

    Otherwise the mask is a tensor and what it hides is computed all the same: short parts, each with the keys it can
    see, keep both small.
    """
    start, end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
    window = batch.sliding_window
    if batch.context_lens[row] == 0 and (window is None or end - start <= window):
        return [PrefillPart(batch, row, start, end)]
    cuts = [*range(start, end, _MAX_MASKED_QUERIES), end]
    return [PrefillPart(batch, row, first, last) for first, last in itertools.pairwise(cuts)]


def _first_visible_blocks(batch: AttentionBatch) -> np.ndarray:
    """Per request, the first block that the first of its new tokens can see."""
    if batch.sliding_window is None:
        return np.zeros_like(batch.context_lens)
    first: np.ndarray = np.maximum(0, batch.context_lens - batch.sliding_window + 1) // batch.block_size
    return first


def _split_by_length(sorted_spans: np.ndarray) -> list[slice]:
    """Cut ascending lengths into runs whose longest is at most ``_MAX_PADDING`` times the shortest."""
    groups, start = [], 0
    while start < len(sorted_spans):
        limit = sorted_spans[start] * _MAX_PADDING
        end = int(np.searchsorted(sorted_spans, limit, side="right"))
        groups.append(slice(start, end))
        start = end
    return groups
