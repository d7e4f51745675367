"""Whether a batch can be computed as the one step that it describes. Asked before anything runs."""

from __future__ import annotations

from pathlib import Path

from ksana.errors import UsageError
from ksana.kv import KVCacheManager
from ksana.perf.config import Batch, BatchConfig
from ksana.types.config import SchedulerConfig
from ksana.types.kv import cdiv


def check_step_limits(batches: BatchConfig, file: Path, limits: SchedulerConfig) -> None:
    """Compare every batch with the limits of a step; needs no model.

    Raises:
        UsageError: naming the file, the batch, the limit and its flag.
    """
    for batch in batches.batches:
        longest = max(group.forwarding_token_num for group in batch.requests)
        arriving = sum(group.request_num for group in batch.requests if group.kv_cached_token_num == 0)
        chunk = limits.split_fuse_token_num
        tokens, budget = batch.num_forwarding_tokens, limits.max_num_batched_tokens
        for name, value, flag, limit in (
            ("forwarding tokens", tokens, "--max-num-batched-tokens", budget),
            ("requests", batch.num_requests, "--max-num-seqs", limits.max_num_seqs),
            ("forwarding tokens in one request", longest, "--split-fuse-token-num", chunk or longest),
            ("requests without cached tokens", arriving, "--max-waiting-queue-len", limits.max_waiting_queue_len),
        ):
            if value > limit:
                raise UsageError(
                    f"{file}: batch {batch.label} has {value} {name}, more than a step takes: it would be split; "
                    f"raise {flag} (now {limit}), or make the batch smaller"
                )


def check_capacity(batches: BatchConfig, file: Path, kv: KVCacheManager, max_model_len: int) -> None:
    """Compare every batch with the loaded model and its KV cache, which is empty.

    Raises:
        UsageError: naming the file, the batch and what to change.
    """
    for batch in batches.batches:
        longest = max(group.kv_cached_token_num + group.forwarding_token_num for group in batch.requests)
        if longest + 1 > max_model_len:
            raise UsageError(
                f"{file}: batch {batch.label} has a request of {longest} tokens, and samples one more; the longest "
                f"possible request has {max_model_len} (see --max-model-len and --num-blocks)"
            )
        needed = _blocks(batch, kv)
        if not kv.has_free_blocks(needed):
            raise UsageError(
                f"{file}: batch {batch.label} needs {needed} blocks of the KV cache, which has "
                f"{kv.num_usable_blocks}; raise "
                "--num-blocks or --cache-max-bytes, or make the batch smaller"
            )


def _blocks(batch: Batch, kv: KVCacheManager) -> int:
    """Blocks that the batch takes at most: each request its tokens and the sampled one, in every group.

    The scheduler admits a request only if each running one could get a block more: one for each is added.
    """
    needed = batch.num_requests
    for group in batch.requests:
        num_tokens = group.kv_cached_token_num + group.forwarding_token_num + 2
        needed += group.request_num * cdiv(num_tokens, kv.block_size)
    return needed
