"""What Gemma's weights and embeddings become in bfloat16, where a rounding too many shows."""

from __future__ import annotations

import pytest
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import KVCache, ModelInputs, StepContext
from ksana.kernels.weights import DecoderLayerWeights
from ksana.models.llama import LlamaModel
from ksana.models.parameters import Parameters
from ksana.testing.random_llama import random_llama
from ksana.types.kv import KVCacheConfig
from ksana.types.model import RopeConfig


class PassingBackend(KernelBackend):
    """Hands on what its layers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[DecoderLayerWeights] = []

    def decoder_layers(
        self, hidden: torch.Tensor, layers: object, context: StepContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        return hidden

    def pack_layer(self, layer: DecoderLayerWeights) -> None:
        self.layers.append(layer)


def test_weights_of_norms_keep_their_digits() -> None:
    """1.001 is no bfloat16 number."""
    stored = torch.tensor([0.001, -0.3, 5.0]).bfloat16()
    parameters = Parameters(torch.bfloat16, torch.device("cpu"))
    weight = parameters.add_offset("norm", 3)
    assert parameters.fill("norm", stored)
    assert torch.equal(weight, 1.0 + stored.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_as_transformers_does(dtype: torch.dtype) -> None:
    """By a factor that is of the model's dtype itself: 5.657 is 5.65625 in bfloat16."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    name = str(dtype).removeprefix("torch.")
    model, weights = random_llama(PassingBackend(), dtype=name, embedding_scale=32**0.5)
    theirs = Gemma3TextScaledWordEmbedding(64, 32, 0, embed_scale=32**0.5)
    theirs.weight.data = weights["model.embed_tokens.weight"].to(dtype)
    tokens = torch.arange(64)
    assert torch.equal(embedded(model, tokens), theirs(tokens))


def test_rows_of_a_prompt_that_replace_embeddings_are_not_scaled() -> None:
    model, _ = random_llama(PassingBackend(), embedding_scale=4.0)
    rows = torch.ones(2, 32)
    assert torch.equal(embedded(model, torch.arange(5), (1, rows))[1:3], rows)


def embedded(model: LlamaModel, tokens: torch.Tensor, *rows: tuple[int, torch.Tensor]) -> torch.Tensor:
    cache = KVCache(KVCacheConfig(()), {})
    with torch.no_grad():
        return model.forward(ModelInputs(tokens, tokens, tokens, list(rows)), StepContext([], [], cache))


def test_layers_share_the_tables_of_equal_ropes() -> None:
    """Two kinds of rotary embedding are two pairs of tables, however many layers there are."""
    backend = PassingBackend()
    full, local = RopeConfig(1e6), RopeConfig(1e4)
    model, _ = random_llama(backend, num_layers=4, rope=full, layer_ropes=(local, local, full, RopeConfig(1e4)))
    assert [layer.attention.rotary_index for layer in backend.layers] == [0, 0, 1, 0]
    tables = model.rotary_tables(torch.tensor([7]))
    assert len(tables) == 2
    for (cos, _), theta in zip(tables, (1e4, 1e6), strict=True):
        assert cos[0, 0, 1].item() == pytest.approx(torch.tensor(7 * theta ** (-2 / 8)).cos().item(), abs=1e-5)
