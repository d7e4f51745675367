"""Paged attention at its plainest: one request and one query head group at a time, in float32.

The oracle that every backend is compared with, and the default of a backend that has no attention of its own.
"""

from __future__ import annotations

import torch

from ksana.kernels.batch import AttentionBatch
from ksana.types.kv import cdiv


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    num_kv_heads: int,
    scale: float,
    soft_cap: float = 0.0,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of each new token over all cached tokens up to itself (the new ones are in the cache already).

    Args:
        query: [T, num_heads, head_size].
        cache: [num_blocks, block_size, 2 * num_kv_heads, head_size], the keys before the values.
        batch: the group's batch.
        scale: factor of the scores.
        soft_cap, kv_scale: see :class:`ksana.kernels.weights.AttentionWeights`.

    Returns:
        [T, num_heads, head_size] in the query's dtype.
    """
    output = torch.empty_like(query)
    group_size = query.shape[1] // num_kv_heads
    for row in range(len(batch.context_lens)):
        start, end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        context = int(batch.context_lens[row])
        length = context + end - start
        blocks = torch.from_numpy(batch.block_tables[row, : cdiv(length, batch.block_size)]).to(query.device)
        kv = cache[blocks].flatten(0, 1)[:length].float() * kv_scale
        keys = kv[:, :num_kv_heads].repeat_interleave(group_size, dim=1)
        values = kv[:, num_kv_heads:].repeat_interleave(group_size, dim=1)
        visible = causal_mask(context, end - start, batch.sliding_window).to(query.device)
        # What is invisible may hold anything, NaN included: take it out before the products, not after.
        values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


def causal_mask(context: int, num_queries: int, window: int | None) -> torch.Tensor:
    """Bool [num_queries, context + num_queries]: True where query i, at position context + i, may look."""
    queries = torch.arange(context, context + num_queries)[:, None]
    keys = torch.arange(context + num_queries)[None, :]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible
