"""A model's layers in one call, or one by one while keys and values move between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import StepContext
from ksana.kernels.weights import DecoderLayerWeights


def run_layers(
    backend: KernelBackend,
    hidden: torch.Tensor,
    layers: Sequence[DecoderLayerWeights],
    context: StepContext,
    rows: torch.Tensor,
) -> torch.Tensor:
    """:meth:`KernelBackend.decoder_layers`, in pieces of a layer if the step's transfers ask for it.

    Args:
        hidden: [T, hidden_size]; may be overwritten.
        rows: int64 [n], ascending: those whose result is wanted.

    Returns:
        [n, hidden_size].
    """
    transfers = context.layer_transfers
    if transfers is None:
        return backend.decoder_layers(hidden, layers, context, rows)
    for layer in layers:
        index = layer.attention.layer_index
        transfers.wait_for_layer_load(index)
        hidden = backend.decoder_layers(hidden, [layer], context, rows if layer is layers[-1] else None)
        transfers.save_kv_layer(index)
    return hidden
