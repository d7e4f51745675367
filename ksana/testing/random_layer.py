"""Random decoder layers and steps through them, for tests of backends that fuse or pack layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from ksana.kernels.base import KernelBackend
from ksana.kernels.batch import AttentionBatch, KVCache, StepContext
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.types.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer, and the cache behind it."""

    hidden: int = 48
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    biased: bool = False
    head_norms: bool = False
    output_norms: bool = False
    precise_norms: bool = False  # whose weights are float32, whatever the dtype
    gelu: bool = False
    rotary_index: int = 0
    window: int | None = None
    soft_cap: float = 0.0
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0

    def weights(self, dtype: torch.dtype | None = None) -> DecoderLayerWeights:
        """Not packed; numbers of the shape's own dtype, kept as another if one is given."""
        generator = torch.Generator().manual_seed(self.seed)

        def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(self.dtype).to(dtype or self.dtype)

        def norm(size: int) -> torch.Tensor:
            if not self.precise_norms:
                return tensor(size)
            wide = torch.promote_types(dtype or self.dtype, torch.float32)
            return torch.randn(size, generator=generator).to(wide)

        def linear(rows: int, columns: int) -> Linear:
            weight = tensor(rows, columns, scale=columns**-0.5)
            return Linear(weight, tensor(rows, scale=0.5) if self.biased else None)

        return DecoderLayerWeights(
            input_norm=norm(self.hidden),
            attention=AttentionWeights(
                qkv=linear((self.heads + 2 * self.kv_heads) * self.head_size, self.hidden),
                output=linear(self.hidden, self.heads * self.head_size),
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                head_size=self.head_size,
                scale=self.head_size**-0.5,
                layer_index=0,
                rotary_index=self.rotary_index,
                q_norm=norm(self.head_size) if self.head_norms else None,
                k_norm=norm(self.head_size) if self.head_norms else None,
                soft_cap=self.soft_cap,
            ),
            mlp_input_norm=norm(self.hidden),
            mlp=GatedMLPWeights(
                linear(2 * self.inner, self.hidden),
                linear(self.hidden, self.inner),
                "gelu_tanh" if self.gelu else "silu",
            ),
            eps=1e-5,
            attention_output_norm=norm(self.hidden) if self.output_norms else None,
            mlp_output_norm=norm(self.hidden) if self.output_norms else None,
        )


class LayerRun:
    """Layers with a cache: tokens of several requests go through them, step by step.

    Args:
        backend: that packs the layer.
        shape: of the layers.
        max_tokens: most tokens of a request.
        max_requests: numbered from 0.
        dtype: of weights and activations, if not the shape's own.
        num_layers: all with the same weights.
    """

    def __init__(
        self,
        backend: KernelBackend,
        shape: LayerShape,
        max_tokens: int,
        max_requests: int,
        dtype: torch.dtype | None = None,
        num_layers: int = 1,
    ) -> None:
        self._backend, self._shape = backend, shape
        self._dtype = dtype or shape.dtype
        self._layers = [shape.weights(self._dtype) for _ in range(num_layers)]
        for index, layer in enumerate(self._layers):
            layer.attention.layer_index = index
            backend.pack_layer(layer)
        blocks = -(-max_tokens // shape.block_size)
        order = np.random.default_rng(shape.seed).permutation(blocks * max_requests) + 1
        self._tables = order.reshape(max_requests, blocks).astype(np.int64)
        cache_shape = (len(order) + 1, shape.block_size, 2 * shape.kv_heads, shape.head_size)
        cache_dtype = shape.cache_dtype or self._dtype
        tensors = {
            index: torch.full(cache_shape, torch.nan, dtype=torch.float32).to(cache_dtype)
            for index in range(num_layers)
        }
        spec = FullAttentionSpec(shape.block_size, shape.kv_heads, shape.head_size, "float32")
        self._cache = KVCache(KVCacheConfig((KVCacheGroup(spec, tuple(tensors), len(order) + 1),)), tensors)

    def step(self, requests: list[tuple[int, int, torch.Tensor]]) -> list[torch.Tensor]:
        """Compute tokens of some requests: (number, tokens before, hidden states [n, hidden]) to new hidden states."""
        starts = np.cumsum([0, *(len(hidden) for _, _, hidden in requests)]).tolist()
        output = self.compute(requests)
        return [output[start:end] for start, end in itertools.pairwise(starts)]

    def compute(
        self, requests: list[tuple[int, int, torch.Tensor]], output_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same as one batch, or some rows of it: see :meth:`KernelBackend.decoder_layers`."""
        size = self._shape.block_size
        counts = [len(hidden) for _, _, hidden in requests]
        rows = np.repeat([number for number, _, _ in requests], counts)
        positions = np.concatenate([np.arange(start, start + len(hidden)) for _, start, hidden in requests])
        batch = AttentionBatch(
            query_starts=np.cumsum([0, *counts], dtype=np.int64),
            context_lens=np.array([start for _, start, _ in requests], dtype=np.int64),
            block_tables=self._tables[[number for number, _, _ in requests]],
            slot_mapping=self._tables[rows, positions // size] * size + positions % size,
            block_size=size,
            sliding_window=self._shape.window,
        )
        half = self._shape.head_size // 2
        angles = torch.from_numpy(positions)[:, None, None] * torch.linspace(1, 0.01, half)
        context = StepContext(
            rotary=[self._rotary(angles), self._rotary(0.3 * angles)],
            attention=[self._backend.build_attention_metadata(batch)],
            cache=self._cache,
        )
        hidden = torch.cat([hidden for _, _, hidden in requests]).to(self._dtype)
        return self._backend.decoder_layers(hidden, self._layers, context, output_rows)

    def _rotary(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Rounded as the model does it, whatever dtype the run is in.
        cos, sin = (t.to(self._shape.dtype).to(self._dtype) for t in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def prompt(self, hidden: torch.Tensor, *, chunk: int, number: int = 0) -> torch.Tensor:
        """All tokens of a request, ``chunk`` at a time."""
        parts = [self.step([(number, at, hidden[at : at + chunk])])[0] for at in range(0, len(hidden), chunk)]
        return torch.cat(parts)


def hidden_states(shape: LayerShape, seed: int, tokens: int) -> torch.Tensor:
    """Random input of a layer: [tokens, hidden]."""
    return torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(seed)).to(shape.dtype)
