"""What becomes of a model's weights under each way of quantising them."""

from __future__ import annotations

import pytest
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.quantization import QuantizedWeight, Weight, quantize
from ksana.kernels.weights import DecoderLayerWeights, Linear
from ksana.models.llama import LlamaModel
from ksana.testing.random_llama import random_llama, random_model_config


class KeepingBackend(KernelBackend):
    """Remembers what it is given to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[list[Weight | None]] = []
        self.head: Weight | None = None

    def pack_layer(self, layer: DecoderLayerWeights) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.layers.append([part.weight for part in (attention.qkv, attention.output, mlp.gate_up, mlp.down)])

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        self.head = weight
        return super().pack_linear(weight, bias)

    def embedded(self, model: LlamaModel, token: int) -> torch.Tensor:
        return self.embed(torch.tensor([token]), model._embedding)[0]


def load(weights: dict[str, Weight], **overrides: object) -> tuple[LlamaModel, KeepingBackend]:
    backend = KeepingBackend()
    model = LlamaModel(random_model_config(**overrides), backend)
    for name, weight in weights.items():
        assert model.load_weight(name, weight), name
    assert model.finish_loading() == []
    return model, backend


def plain_weights(*, tied: bool = False) -> dict[str, Weight]:
    weights: dict[str, Weight] = dict(random_llama(KernelBackend())[1])
    if tied:
        del weights["lm_head.weight"]
    return weights


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_projections_and_head_are_rounded_on_load(kind: str, bits: int) -> None:
    weights = plain_weights()
    model, backend = load(weights, quantization=kind, quantization_group_size=32)
    for layer in backend.layers:
        assert all(isinstance(part, QuantizedWeight) and (part.bits, part.group_size) == (bits, 32) for part in layer)
    query = weights["model.layers.1.self_attn.q_proj.weight"]
    assert isinstance(query, torch.Tensor)
    rounded = backend.layers[1][0]
    assert isinstance(rounded, QuantizedWeight)
    assert torch.equal(rounded.dequantize()[: len(query)], quantize(query, bits, 32, torch.float32).dequantize())
    assert isinstance(backend.head, QuantizedWeight)
    assert backend.head.bits == 8  # the head loses more by rounding than a layer
    assert torch.equal(backend.embedded(model, 5), weights["model.embed_tokens.weight"][5])  # type: ignore[index]


def test_a_tied_head_is_rounded_and_its_table_is_not() -> None:
    weights = plain_weights(tied=True)
    model, backend = load(weights, quantization="int4", quantization_group_size=32, tie_word_embeddings=True)
    assert isinstance(backend.head, QuantizedWeight)
    assert torch.equal(backend.embedded(model, 5), weights["model.embed_tokens.weight"][5])  # type: ignore[index]


def test_a_tied_embedding_that_comes_quantised_serves_both() -> None:
    weights = plain_weights(tied=True)
    embedding = weights["model.embed_tokens.weight"]
    assert isinstance(embedding, torch.Tensor)
    stored = weights["model.embed_tokens.weight"] = quantize(embedding, 4, 32, torch.float32)
    model, backend = load(weights, quantization="stored", tie_word_embeddings=True)
    assert backend.head is stored
    assert torch.equal(backend.embedded(model, 5), stored.dequantize()[5])


def test_parts_in_different_formats_become_plain_together() -> None:
    """v in another format than q and k, down plain: as many files have it."""
    weights = plain_weights()
    expected = {}
    for name in [name for name in weights if "_proj" in name and "down" not in name]:
        weight = weights[name]
        assert isinstance(weight, torch.Tensor)
        quantized = weights[name] = quantize(weight, 8 if ".v_proj" in name else 4, 32, torch.float32)
        expected[name] = quantized.dequantize()
    _, backend = load(weights, quantization="stored")
    qkv, output, gate_up, down = backend.layers[0]
    prefix = "model.layers.0.self_attn"
    assert isinstance(qkv, torch.Tensor)
    assert torch.equal(qkv, torch.cat([expected[f"{prefix}.{part}_proj.weight"] for part in "qkv"]))
    assert isinstance(output, QuantizedWeight)
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, torch.Tensor)
    assert torch.equal(down, weights["model.layers.0.mlp.down_proj.weight"])  # type: ignore[arg-type]


def test_unquantised_models_get_tensors_only() -> None:
    _, backend = load(plain_weights())
    assert all(isinstance(part, torch.Tensor) for layer in backend.layers for part in [*layer, backend.head])
