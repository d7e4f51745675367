"""From a step's logits to what may follow each beam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.types.output import TokenLogprobs
from ksana.types.step import BeamCandidates
from ksana.worker.logits_processor import BANNED, LogitsProcessors


def beam_candidates(
    backend: KernelBackend,
    logits: torch.Tensor,
    request_ids: Sequence[str],
    num_candidates: np.ndarray,
    num_logprobs: np.ndarray,
    processors: LogitsProcessors,
) -> dict[str, BeamCandidates]:
    """The likeliest tokens behind each beam.

    As transformers does, processors change log probabilities here, and not logits.

    Args:
        backend: that computed the logits.
        logits: float32 [n, vocab_size], finite.
        request_ids: of the beams, [n].
        num_candidates: int64 [n], how many each needs.
        num_logprobs: int64 [n], of the likeliest tokens to report beside each candidate; -1 to report nothing.
        processors: change what is likely.
    """
    largest = backend.top_k(logits, 1)[0][:, 0].astype(np.float64)
    normalizers = largest + np.log(backend.exp_sums(logits, np.ones(len(logits), dtype=np.float32)))
    own = logits - torch.from_numpy(normalizers.astype(np.float32)).to(logits.device)[:, None]
    scores = _processed(own, request_ids, processors)
    found: dict[str, BeamCandidates] = {}
    # The beams of a search need as much of everything; ties must not fall differently because another needs more.
    for wanted in np.unique(np.stack([num_candidates, num_logprobs], axis=-1), axis=0):
        rows = np.flatnonzero((num_candidates == wanted[0]) & (num_logprobs == wanted[1]))
        index = torch.from_numpy(rows).to(logits.device)
        reported = None if wanted[1] < 0 else own[index]
        best = _best(backend, scores[index], reported, int(wanted[0]), int(wanted[1]))
        found.update(zip([request_ids[row] for row in rows.tolist()], best, strict=True))
    return found


def _processed(own: torch.Tensor, request_ids: Sequence[str], processors: LogitsProcessors) -> torch.Tensor:
    rows = [row for row, request_id in enumerate(request_ids) if request_id in processors]
    if not rows:
        return own
    changed = own[rows]
    processors.apply(changed, [request_ids[row] for row in rows])
    scores = own.clone()
    scores[rows] = changed
    return scores


def _best(
    backend: KernelBackend, scores: torch.Tensor, own: torch.Tensor | None, count: int, num_logprobs: int
) -> list[BeamCandidates]:
    """The ``count`` best of each row, with what is reported of them: the model's ``own`` log probabilities."""
    best, ids = backend.top_k(scores, min(count, scores.shape[-1]))
    allowed = (best > BANNED).sum(axis=-1).tolist()
    rows = zip(ids.tolist(), best.tolist(), allowed, strict=True)
    if own is None:
        return [BeamCandidates(tokens[:end], values[:end]) for tokens, values, end in rows]
    chosen = own.gather(-1, torch.from_numpy(ids).to(own.device)).tolist()
    candidates = []
    for (tokens, values, end), logprobs, top in zip(rows, chosen, _tops(backend, own, num_logprobs), strict=True):
        entries = [TokenLogprobs(token, logprob, top) for token, logprob in zip(tokens, logprobs, strict=True)]
        candidates.append(BeamCandidates(tokens[:end], values[:end], entries[:end]))
    return candidates


def _tops(backend: KernelBackend, own: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    if count == 0:
        return [()] * len(own)
    values, ids = backend.top_k(own, min(count, own.shape[-1]))
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
