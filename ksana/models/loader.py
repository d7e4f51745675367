"""Fills a model with weights, one tensor at a time, and accounts for every name."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

import torch

from ksana.errors import ModelLoadError
from ksana.kernels.quantization import Weight
from ksana.models.base import Model

logger = logging.getLogger(__name__)

_LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_NAMES_SHOWN = 5

_IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tables that old checkpoints carry and models compute."""

_TIED_HEAD = "lm_head.weight"
"""Some checkpoints of tied models store the head too. A model with a head of its own takes it and gets here never."""


def load_weights(
    model: Model,
    weights: Iterable[tuple[str, Weight]],
    *,
    progress: bool,
) -> None:
    """Hand every weight to ``model`` and check that names match on both sides.

    Args:
        model: receives the weights.
        weights: (Hugging Face name, weight on the CPU), consumed once.
        progress: show a progress bar on standard error; one log line is written either way.

    Raises:
        ModelLoadError: a weight has no place in the model or another shape there, a parameter got no weight, or a
            dtype is no float.
    """
    start = time.monotonic()
    unexpected: list[str] = []
    num_bytes = 0
    for name, weight in _with_progress_bar(weights, model.num_weights()) if progress else weights:
        if name.endswith(_IGNORABLE_SUFFIXES):
            continue
        if weight.dtype not in _LOADABLE_DTYPES:
            raise ModelLoadError(f"tensor {name} is of dtype {weight.dtype}: weights quantised so are not supported")
        num_bytes += weight.nbytes
        if not model.load_weight(name, weight) and name != _TIED_HEAD:
            unexpected.append(name)
    if unexpected:
        raise ModelLoadError(f"the weight files hold tensors that the model does not have: {_some(unexpected)}")
    missing = model.finish_loading()
    if missing:
        raise ModelLoadError(f"the weight files lack tensors that the model needs: {_some(missing)}")
    logger.info("loaded weights of %.0f MiB in %.1f s", num_bytes / 2**20, time.monotonic() - start)


def _with_progress_bar(weights: Iterable[tuple[str, Weight]], total: int) -> Iterator[tuple[str, Weight]]:
    from rich.console import Console
    from rich.progress import track

    yield from track(weights, description="Loading weights", total=total, console=Console(stderr=True), transient=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    rest = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
