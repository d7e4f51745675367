"""From logits to tokens, for a whole batch.

Every row is treated by its own parameters alone, with operators that work row by row, so that what else is in the
batch cannot change its token. Sampling inverts the distribution function at one uniform number a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

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


def sample(logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    """Draw one token a row.

    Args:
        logits: float32 [n, vocab_size].
        params: of the n rows.

    Returns:
        int64 [n] token ids.
    """
    greedy = params.temperatures == 0.0
    if greedy.all():
        return logits.argmax(dim=-1).numpy()
    vocab_size = logits.shape[-1]
    tokens = np.empty(len(greedy), dtype=np.int64)
    filtered = ~greedy & (((params.top_ks > 0) & (params.top_ks < vocab_size)) | (params.top_ps < 1.0))
    for rows, draw in ((greedy, _greedy), (filtered, _sample_filtered), (~greedy & ~filtered, _sample_plain)):
        index = np.flatnonzero(rows)
        if len(index):
            tokens[index] = draw(logits[torch.from_numpy(index)], params.take(index))
    return tokens


def token_logprobs(logits: torch.Tensor, tokens: np.ndarray, counts: np.ndarray) -> list[TokenLogprobs]:
    """Log probabilities of the drawn tokens and of the likeliest.

    Args:
        logits: float32 [n, vocab_size].
        tokens: int64 [n], drawn.
        counts: int64 [n], how many of the likeliest each row wants.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, torch.from_numpy(tokens)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(int(counts.max()), logits.shape[-1]), dim=-1)
    rows = zip(tokens.tolist(), chosen, ids.tolist(), values.tolist(), counts.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, logprob, top_ids, top_values, count in rows
    ]


def _greedy(logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    return logits.argmax(dim=-1).numpy()


def _softmax(logits: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """Probabilities by each row's temperature. Softmax is computed row by row, unlike a sum over a lone long row."""
    return torch.softmax(logits / _column(np.maximum(params.temperatures, _LEAST_TEMPERATURE)), dim=-1)


def _sample_plain(logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    """All tokens are candidates (min-p needs no order)."""
    return _invert(_apply_min_p(_softmax(logits, params), params), params.uniforms)


def _sample_filtered(logits: torch.Tensor, params: SamplingRows) -> np.ndarray:
    """Top-k, then top-p over what is left, then min-p, on the likeliest tokens in order."""
    probabilities = _softmax(logits, params)
    vocab_size = logits.shape[-1]
    count = min(_MAX_CANDIDATES, vocab_size)
    tokens = np.empty(len(logits), dtype=np.int64)
    values, ids = probabilities.topk(count, dim=-1)
    top_ks = np.where(params.top_ks > 0, params.top_ks, vocab_size)
    mass = values.double().cumsum(dim=-1)[:, -1].numpy()
    enough = (top_ks <= count) | ((top_ks >= vocab_size) & (mass >= params.top_ps)) | (count == vocab_size)
    for row in np.flatnonzero(~enough):
        everything, order = probabilities[row : row + 1].sort(dim=-1, descending=True, stable=True)
        tokens[row] = _draw_sorted(everything, order, top_ks[[row]], vocab_size, params.take(np.array([row])))[0]
    rows = np.flatnonzero(enough)
    if len(rows):
        index = torch.from_numpy(rows)
        tokens[rows] = _draw_sorted(values[index], ids[index], top_ks[rows], vocab_size, params.take(rows))
    return tokens


def _draw_sorted(
    values: torch.Tensor, ids: torch.Tensor, top_ks: np.ndarray, vocab_size: int, params: SamplingRows
) -> np.ndarray:
    """Draw from probabilities in descending order, [n, candidates], that add up to 1 over the whole vocabulary."""
    outside = torch.arange(values.shape[-1])[None, :] >= torch.from_numpy(top_ks)[:, None]
    probabilities = values.double().masked_fill(outside, 0.0)
    cumulated = probabilities.cumsum(dim=-1)
    # Without top-k the mass is that of the whole vocabulary, candidates or not.
    total = torch.where(_column(top_ks) < vocab_size, cumulated[:, -1:], 1.0)
    beyond = cumulated - probabilities >= _column(params.top_ps).double() * total
    beyond[:, 0] = False  # the likeliest token always stays, even if top-p is too small for a float32
    probabilities = probabilities.masked_fill(beyond, 0.0)
    chosen = _invert(_apply_min_p(probabilities, params), params.uniforms)
    return ids.gather(-1, torch.from_numpy(chosen)[:, None])[:, 0].numpy()


def _apply_min_p(probabilities: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    if not params.min_ps.any():
        return probabilities
    floor = probabilities.amax(dim=-1, keepdim=True) * _column(params.min_ps)
    return probabilities.masked_fill(probabilities < floor, 0.0)


def _invert(weights: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """The first index whose cumulated weight exceeds uniform * total."""
    cumulated = weights.double().cumsum(dim=-1)
    targets = torch.from_numpy(uniforms)[:, None] * cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, targets, right=True)[:, 0]
    # Rounding may put the target on the total itself: take the last token that has any weight.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(chosen, last).numpy()


def _column(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]
