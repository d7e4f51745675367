"""The interface of a kernel backend, with a plain torch default for every operator.

Models call the coarsest operator, :meth:`KernelBackend.decoder_layer`. Its default is made of the next finer ones, and
so on down to single operators: a new device overrides at the level it is good at, a native library at the top, a set
of Triton kernels in the middle, and whatever it leaves out works.

Attention has three parts: static facts (:attr:`KernelBackend.name`, the cache layout), metadata that is built once per
step and group (:meth:`build_attention_metadata`), and the call in every layer (:meth:`attention`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ksana.kernels import reference
from ksana.kernels.batch import AttentionBatch, KVCache, StepContext
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.types.kv import KVCacheConfig

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a :class:`ksana.types.model.ModelConfig` dtype name."""
    return _TORCH_DTYPES[name]


class KernelBackend:
    """Operators on one device. Hidden states are [T, hidden_size], T being the tokens of the whole batch."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    # -- memory ------------------------------------------------------------------------------------------------

    def available_memory(self) -> int:
        """Bytes that could be allocated on the device now."""
        raise NotImplementedError(f"backend {self.name} does not know its memory; set the number of blocks")

    def allocate_kv_cache(self, config: KVCacheConfig) -> KVCache:
        """Zeroed cache tensors, each [num_blocks, block_size, 2 * num_kv_heads, head_size], keys before values."""
        spec = config.groups[0].spec
        shape = (config.num_blocks, spec.block_size, 2 * spec.num_kv_heads, spec.head_size)
        dtype = torch_dtype(spec.dtype)
        return KVCache(config, [self.allocate_zeros(shape, dtype) for _ in range(config.num_tensors)])

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def copy_blocks(self, cache: KVCache, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every cache tensor."""
        sources, destinations = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
        for tensor in cache.tensors:
            tensor[destinations] = tensor[sources]

    # -- weights -----------------------------------------------------------------------------------------------

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Take a loaded projection over, its memory too; called once for each, after its weights are complete."""
        return Linear(weight, bias)

    # -- single operators --------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """[T, in_features] -> [T, out_features]."""
        assert linear.weight is not None, "packed by another backend"
        return F.linear(x, linear.weight, linear.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square normalisation over the last dimension (Zhang and Sennrich 2019)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding (Su et al. 2021) of heads [T, heads, head_size], NeoX style, in place."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x.mul_(cos), swapped, sin, out=x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n] -> [T, n]: SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def write_kv(self, cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write keys and values [T, 2 * num_kv_heads, head_size] to ``slots`` int64 [T] of a layer's cache."""
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kv)

    # -- attention ---------------------------------------------------------------------------------------------

    def build_attention_metadata(self, batch: AttentionBatch) -> Any:
        """Whatever :meth:`attention` needs, computed once per step and group. Must have ``.slot_mapping``."""
        return _ReferenceMetadata(batch, self.device)

    def attention(
        self, query: torch.Tensor, kv: torch.Tensor, cache: torch.Tensor, metadata: Any, weights: AttentionWeights
    ) -> torch.Tensor:
        """Paged attention; the batch's own keys and values are in the cache already.

        Args:
            query: [T, num_heads, head_size].
            kv: [T, 2 * num_kv_heads, head_size], the batch's own keys and values, the same as in the cache.
            cache: of this layer.
            metadata: from :meth:`build_attention_metadata`.

        Returns:
            [T, num_heads, head_size].
        """
        return reference.paged_attention(query, cache, metadata.batch, weights.num_kv_heads, weights.scale)

    # -- blocks of a layer -------------------------------------------------------------------------------------

    def attention_block(
        self, x: torch.Tensor, weights: AttentionWeights, eps: float, context: StepContext
    ) -> torch.Tensor:
        """Projections, norms of q and k, rotary embedding, cache write, attention: [T, hidden] -> [T, hidden]."""
        group_id, cache = context.cache.layer(weights.layer_index)
        metadata = context.attention[group_id]
        heads, kv_heads = weights.num_heads, weights.num_kv_heads
        qkv = self.linear(x, weights.qkv).view(x.shape[0], heads + 2 * kv_heads, weights.head_size)
        query, key, kv = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads:]
        if weights.q_norm is not None and weights.k_norm is not None:
            query.copy_(self.rms_norm(query, weights.q_norm, eps))
            key.copy_(self.rms_norm(key, weights.k_norm, eps))
        self.rotary(qkv[:, : heads + kv_heads], context.cos, context.sin)
        self.write_kv(cache, metadata.slot_mapping, kv)
        attended = self.attention(query, kv, cache, metadata, weights)
        return self.linear(attended.reshape(x.shape[0], heads * weights.head_size), weights.output)

    def mlp_block(self, x: torch.Tensor, weights: GatedMLPWeights) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.linear(self.silu_and_mul(self.linear(x, weights.gate_up)), weights.down)

    def decoder_layer(self, hidden: torch.Tensor, layer: DecoderLayerWeights, context: StepContext) -> torch.Tensor:
        """A whole layer, residual connections included: [T, hidden] -> [T, hidden]. May overwrite ``hidden``."""
        normed = self.rms_norm(hidden, layer.input_norm, layer.eps)
        hidden = hidden.add_(self.attention_block(normed, layer.attention, layer.eps, context))
        normed = self.rms_norm(hidden, layer.post_attention_norm, layer.eps)
        return hidden.add_(self.mlp_block(normed, layer.mlp))


class _ReferenceMetadata:
    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        self.batch = batch
        self.slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
