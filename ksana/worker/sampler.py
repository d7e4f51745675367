"""From logits to tokens, for a whole batch.

Every row is treated by its own parameters alone, with operators that work row by row, so that what else is in the
batch cannot change its token. Sampling inverts the distribution function at one uniform number a row. What has to look
at the whole vocabulary is an operator of the backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.types.output import TokenLogprobs

_MAX_CANDIDATES = 1024
"""Tokens that top-k and top-p look at before a full sort is needed. Fixed: ties must not fall differently when another
row asks for more."""

_LEAST_TEMPERATURE = np.float32(1e-8)
"""Below it the likeliest token is taken anyhow, and dividing by it might overflow."""


@dataclass(slots=True)
class SamplingRows:
    """Parameters of the rows to sample, one entry a row.

    Attributes:
        temperatures: float32; 0 for greedy rows.
        top_ks: int64; 0 for no limit.
        top_ps, min_ps: float32.
        uniforms: float64 in [0, 1).
    """

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    uniforms: np.ndarray

    def take(self, rows: np.ndarray) -> SamplingRows:
        """The parameters of some rows."""
        return SamplingRows(
            self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.min_ps[rows], self.uniforms[rows]
        )


def sample(
    backend: KernelBackend, logits: torch.Tensor, likeliest: np.ndarray, params: SamplingRows, rows: np.ndarray
) -> np.ndarray:
    """Draw one token for each of some rows.

    Args:
        backend: that computed the logits.
        logits: float32 [n, vocab_size], finite.
        likeliest: int64 [n], the first largest logit of each row.
        params: of the m rows.
        rows: int64 [m], ascending, of the logits.

    Returns:
        int64 [m] token ids.
    """
    tokens: np.ndarray = likeliest[rows]
    greedy = params.temperatures == 0.0
    if greedy.all():
        return tokens
    vocab_size = logits.shape[-1]
    filtered = ~greedy & (((params.top_ks > 0) & (params.top_ks < vocab_size)) | (params.top_ps < 1.0))
    for chosen, draw in ((filtered, _sample_filtered), (~greedy & ~filtered, _sample_plain)):
        index = np.flatnonzero(chosen)
        if len(index):
            tokens[index] = draw(backend, take_rows(logits, rows[index]), params.take(index))
    return tokens


def token_logprobs(
    backend: KernelBackend, logits: torch.Tensor, tokens: np.ndarray, counts: np.ndarray
) -> list[TokenLogprobs]:
    """Log probabilities of the drawn tokens and of the likeliest.

    Args:
        backend: that computed the logits.
        logits: float32 [n, vocab_size], finite.
        tokens: int64 [n], drawn.
        counts: int64 [n], how many of the likeliest each row wants, 0 or more.
    """
    values, ids = backend.top_k(logits, min(max(1, int(counts.max())), logits.shape[-1]))
    log_sums = np.log(backend.exp_sums(logits, np.ones(len(tokens), dtype=np.float32)))
    chosen = logits.gather(-1, torch.from_numpy(tokens).to(logits.device)[:, None])[:, 0].cpu().numpy()
    # In float64, and the largest logit first: it is what the sums are relative to.
    largest = values[:, 0].astype(np.float64)
    chosen_logprobs = (chosen - largest - log_sums).tolist()
    top_logprobs = (values - largest[:, None] - log_sums[:, None]).tolist()
    rows = zip(tokens.tolist(), chosen_logprobs, ids.tolist(), top_logprobs, counts.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, logprob, top_ids, top_values, count in rows
    ]


def _sample_plain(backend: KernelBackend, logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    """All tokens are candidates (min-p needs no order)."""
    return backend.draw(logits, _positive(params.temperatures), params.min_ps, params.uniforms)


def _sample_filtered(backend: KernelBackend, logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    """Top-k, then top-p over what is left, then min-p, on the likeliest tokens in order."""
    vocab_size = logits.shape[-1]
    count = min(_MAX_CANDIDATES, vocab_size)
    top_ks = np.where(params.top_ks > 0, params.top_ks, vocab_size)
    sums = backend.exp_sums(logits, _positive(params.temperatures))
    probabilities, ids = _candidates(backend, logits, params, sums, count)
    mass = probabilities.sum(axis=-1)
    enough = (top_ks <= count) | ((top_ks >= vocab_size) & (mass >= params.top_ps)) | (count == vocab_size)
    tokens = _draw_sorted(probabilities, ids, top_ks, vocab_size, params)
    for row in np.flatnonzero(~enough):
        index = np.array([row])
        own = params.take(index)
        everything, order = _candidates(backend, take_rows(logits, index), own, sums[index], vocab_size)
        tokens[row] = _draw_sorted(everything, order, top_ks[index], vocab_size, own)[0]
    return tokens


def _candidates(
    backend: KernelBackend, logits: torch.Tensor, params: SamplingRows, sums: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens in descending order: float64 [n, count] of their probabilities, int64 [n, count] of ids."""
    values, ids = backend.top_k(logits, count)
    shifted = values.astype(np.float64) - values[:, :1]
    return np.exp(shifted / _positive(params.temperatures)[:, None]) / sums[:, None], ids


def _draw_sorted(
    probabilities: np.ndarray, ids: np.ndarray, top_ks: np.ndarray, vocab_size: int, params: SamplingRows
) -> np.ndarray:
    """Draw from probabilities in descending order, [n, candidates], that add up to 1 over the whole vocabulary."""
    outside = np.arange(probabilities.shape[-1])[None, :] >= top_ks[:, None]
    kept = np.where(outside, 0.0, probabilities)
    cumulated = kept.cumsum(axis=-1)
    # Without top-k the mass is that of the whole vocabulary, candidates or not.
    total = np.where(top_ks[:, None] < vocab_size, cumulated[:, -1:], 1.0)
    beyond = cumulated - kept >= params.top_ps[:, None].astype(np.float64) * total
    beyond |= kept < kept[:, :1] * params.min_ps[:, None]
    beyond[:, 0] = False  # the likeliest token always stays, even if top-p is too small for a float32
    kept[beyond] = 0.0
    cumulated = kept.cumsum(axis=-1)
    chosen = (cumulated <= params.uniforms[:, None] * cumulated[:, -1:]).sum(axis=-1)
    # Rounding may put the target on the total itself: take the last token that has any weight.
    last = (kept > 0).sum(axis=-1) - 1
    drawn: np.ndarray = np.take_along_axis(ids, np.minimum(chosen, last)[:, None], axis=-1)[:, 0]
    return drawn


def _positive(temperatures: np.ndarray) -> np.ndarray:
    positive: np.ndarray = np.maximum(temperatures, _LEAST_TEMPERATURE)
    return positive


def take_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Rows in ascending order, without repetition: a copy only if not all are wanted."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
