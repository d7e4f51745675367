"""The interface of a kernel backend, with a plain torch default for every operator.

Models call the coarsest operator, :meth:`KernelBackend.decoder_layers`. Its default is made of the next finer ones, and
so on down to single operators: a new device overrides at the level it is good at, a native library at the top, a set
of Triton kernels in the middle, and whatever it leaves out works.

Attention has three parts: static facts (:attr:`KernelBackend.name`, the cache layout), metadata that is built once per
step and group (:meth:`build_attention_metadata`), and the call in every layer (:meth:`attention`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ksana.kernels import reference
from ksana.kernels.batch import AttentionBatch, KVCache, StepContext
from ksana.kernels.float8 import to_float8
from ksana.kernels.quantization import Weight
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, GatedMLPWeights, Linear
from ksana.types.kv import BlockCopy, KVCacheConfig

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in :class:`ksana.types.model.ModelConfig` or :class:`ksana.types.kv.KVCacheSpec`."""
    return _TORCH_DTYPES[name]


class KernelBackend:
    """Operators on one device. Hidden states are [T, hidden_size], T being the tokens of the whole batch."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._told_of_unpacking = False

    def operator_seconds(self) -> dict[str, float]:
        """Seconds spent in each operator, by its name, added up since the backend was made.

        For profiling: whoever wants the cost of a step takes the difference between two calls. Names are the backend's
        own, and one that has not run yet may be missing. A backend that keeps no such account returns an empty dict, as
        this default does; keeping one must not cost the operators measurable time.
        """
        return {}

    # -- memory ------------------------------------------------------------------------------------------------

    def available_memory(self) -> int:
        """Bytes that could be allocated on the device now."""
        raise NotImplementedError(f"backend {self.name} does not know its memory; set the number of blocks")

    def kv_cache_dtypes(self, model_dtype: str) -> tuple[str, ...]:
        """Dtypes in which the backend can keep the keys and values of a model of ``model_dtype``."""
        return (model_dtype,)

    def allocate_kv_cache(self, config: KVCacheConfig) -> KVCache:
        """Zeroed tensors, for each layer [blocks, block_size, 2 * num_kv_heads, head_size], keys before values."""
        tensors = {}
        for group in config.groups:
            spec = group.spec
            shape = (group.num_blocks, spec.block_size, 2 * spec.num_kv_heads, spec.head_size)
            for layer in group.layer_indices:
                tensors[layer] = self.allocate_zeros(shape, torch_dtype(spec.dtype))
        return KVCache(config, tensors)

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def copy_blocks(self, cache: KVCache, copies: list[BlockCopy]) -> None:
        """Copy whole blocks, in the cache tensors of all layers of their group; all sources are read first."""
        for group_id in {copy[0] for copy in copies}:
            pairs = [copy[1:] for copy in copies if copy[0] == group_id]
            sources, destinations = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
            for tensor in cache.group_tensors(group_id):
                tensor[destinations] = tensor[sources]

    # -- weights -----------------------------------------------------------------------------------------------

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Take a loaded projection over, its memory too; called once for each, after its weights are complete.

        A backend without kernels for quantised weights makes plain ones of them, as this default does.
        """
        return Linear(self._plain(weight), bias)

    def pack_tied_head(self, head: Linear) -> Linear:
        """The same for a head that is the embedding as well: :meth:`embed` finds its rows in what this returns.

        This default keeps the plain weight beside the packed one. A backend that finds rows in its own saves that.
        """
        assert isinstance(head.weight, torch.Tensor), "a quantised head is no embedding"
        packed = self.pack_linear(head.weight, head.bias)
        packed.weight = head.weight
        return packed

    def _plain(self, weight: Weight) -> torch.Tensor:
        """The weight as a tensor on the device; says once that quantised ones gain nothing here."""
        if isinstance(weight, torch.Tensor):
            return weight
        if not self._told_of_unpacking:
            self._told_of_unpacking = True
            logger.warning(
                "backend %s unpacks weights of %d bits in groups of %d to %s: it has no kernels for them",
                self.name,
                weight.bits,
                weight.group_size,
                str(weight.dtype).removeprefix("torch."),
            )
        return weight.dequantize().to(self.device)

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        """A norm's weight outside of layers, as :meth:`rms_norm` reads it without conversion; the same numbers."""
        return weight

    def pack_layer(self, layer: DecoderLayerWeights) -> None:
        """Take a loaded layer over, in place; called once for each, after its weights are complete."""
        attention, mlp = layer.attention, layer.mlp
        attention.qkv = self._packed(attention.qkv)
        attention.output = self._packed(attention.output)
        mlp.gate_up = self._packed(mlp.gate_up)
        mlp.down = self._packed(mlp.down)

    def _packed(self, linear: Linear) -> Linear:
        assert linear.weight is not None, "packed already"
        return self.pack_linear(linear.weight, linear.bias)

    # -- single operators --------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """[T, in_features] -> [T, out_features]."""
        assert isinstance(linear.weight, torch.Tensor), "packed by another backend"
        return F.linear(x, linear.weight, linear.bias)

    def logits(self, x: torch.Tensor, head: Linear, soft_cap: float = 0.0) -> torch.Tensor:
        """[T, hidden_size] -> float32 [T, vocab_size], each bent to ``soft_cap * tanh(logit / soft_cap)`` if not 0."""
        logits = self.linear(x, head).float()
        return logits.div_(soft_cap).tanh_().mul_(soft_cap) if soft_cap else logits

    def embed(self, token_ids: torch.Tensor, embedding: Linear) -> torch.Tensor:
        """Rows of the embedding: int64 [T] -> [T, hidden_size]. A tied head may be packed already."""
        assert isinstance(embedding.weight, torch.Tensor), "packed by another backend"
        return F.embedding(token_ids, embedding.weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square normalisation over the last dimension (Zhang and Sennrich 2019).

        Args:
            x: [..., n].
            weight: [n], of the dtype of ``x`` or float32; with the latter, only the result is rounded.
        """
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding (Su et al. 2021) of heads [T, heads, head_size], NeoX style, in place."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x.mul_(cos), swapped, sin, out=x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n] -> [T, n]: SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n] -> [T, n]: GELU (Hendrycks and Gimpel 2016), by tanh, of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def write_kv(self, cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor, scale: float = 1.0) -> None:
        """Write keys and values to a layer's cache.

        Args:
            cache: of ``kv``'s dtype or of eight bits.
            slots: int64 [T].
            kv: [T, 2 * num_kv_heads, head_size].
            scale: what they are divided by in a cache of eight bits; 1 for any other.
        """
        memory = cache.view(-1, *cache.shape[2:])
        if cache.dtype == kv.dtype:
            memory.index_copy_(0, slots, kv)
        else:
            memory[slots] = to_float8(kv, cache.dtype, scale)

    # -- sampling ----------------------------------------------------------------------------------------------
    # Logits are float32 [n, vocab_size]. What a row gives must not depend on the other rows.

    def argmax(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest token of each row, int64 [n], and whether all of the row is finite, bool [n]."""
        # NaN or infinity anywhere shows in the sum, which float64 can hold however large the logits are.
        finite = torch.isfinite(logits.sum(dim=-1, dtype=torch.float64))
        return logits.argmax(dim=-1).cpu().numpy(), finite.cpu().numpy()

    def likeliest(self, x: torch.Tensor, head: Linear, soft_cap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`argmax` of :meth:`logits`, for whoever does not need the logits themselves."""
        return self.argmax(self.logits(x, head, soft_cap))

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest logits of each row in descending order, float32 [n, k], and their tokens, int64 [n, k]."""
        values, tokens = logits.topk(k, dim=-1)
        return values.cpu().numpy(), tokens.cpu().numpy()

    def exp_sums(self, logits: torch.Tensor, temperatures: np.ndarray) -> np.ndarray:
        """Sum over each row of ``exp((logit - largest logit) / temperature)``, float64 [n].

        Args:
            logits: finite.
            temperatures: float32 [n], positive.
        """
        return self._exp_weights(logits, temperatures).sum(dim=-1).cpu().numpy()

    def draw(
        self, logits: torch.Tensor, temperatures: np.ndarray, min_ps: np.ndarray, uniforms: np.ndarray
    ) -> np.ndarray:
        """One token a row by inverting its distribution function: int64 [n].

        Args:
            logits: finite.
            temperatures: float32 [n], positive.
            min_ps: float32 [n]; tokens less likely than this times the likeliest are left out.
            uniforms: float64 [n] in [0, 1).
        """
        weights = self._exp_weights(logits, temperatures)
        weights[weights < torch.from_numpy(min_ps).to(weights)[:, None]] = 0.0  # the likeliest has a weight of 1
        cumulated = weights.cumsum(dim=-1)
        targets = torch.from_numpy(uniforms).to(cumulated)[:, None] * cumulated[:, -1:]
        chosen = torch.searchsorted(cumulated, targets, right=True)[:, 0]
        # Rounding may put the target on the total itself: take the last token that has any weight.
        last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
        return torch.minimum(chosen, last).cpu().numpy()

    def _exp_weights(self, logits: torch.Tensor, temperatures: np.ndarray) -> torch.Tensor:
        """float64, since a float32 sum over a lone long row is cut in pieces by the number of threads.

        What is too small for a float32 is 0, or a uniform number of 0 would draw a token that cannot be.
        """
        shifted = (logits - logits.amax(dim=-1, keepdim=True)).double()
        weights = (shifted / torch.from_numpy(temperatures).to(shifted)[:, None]).exp()
        return weights.masked_fill(weights < torch.finfo(torch.float32).tiny, 0.0)

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
            kv: [T, 2 * num_kv_heads, head_size], the batch's own keys and values, which are in the cache too.
            cache: of this layer.
            metadata: from :meth:`build_attention_metadata`.

        Returns:
            [T, num_heads, head_size].
        """
        return reference.paged_attention(
            query, cache, metadata.batch, weights.num_kv_heads, weights.scale, weights.soft_cap, weights.kv_scale
        )

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
        self.rotary(qkv[:, : heads + kv_heads], *context.rotary[weights.rotary_index])
        self.write_kv(cache, metadata.slot_mapping, kv, weights.kv_scale)
        attended = self.attention(query, kv, cache, metadata, weights)
        return self.linear(attended.reshape(x.shape[0], heads * weights.head_size), weights.output)

    def mlp_block(self, x: torch.Tensor, weights: GatedMLPWeights) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate_up = self.linear(x, weights.gate_up)
        gated = self.silu_and_mul(gate_up) if weights.activation == "silu" else self.gelu_and_mul(gate_up)
        return self.linear(gated, weights.down)

    def decoder_layers(
        self,
        hidden: torch.Tensor,
        layers: Sequence[DecoderLayerWeights],
        context: StepContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers of a model.

        Args:
            hidden: [T, hidden_size]; may be overwritten.
            layers: in order.
            context: of the step.
            rows: int64 [n], ascending: those whose result is wanted. What the others need not is left out.

        Returns:
            [n, hidden_size], or [T, hidden_size] if ``rows`` is None.
        """
        for layer in layers:
            hidden = self.decoder_layer(hidden, layer, context)
        return hidden if rows is None else hidden.index_select(0, rows)

    def decoder_layer(self, hidden: torch.Tensor, layer: DecoderLayerWeights, context: StepContext) -> torch.Tensor:
        """A whole layer, residual connections included: [T, hidden] -> [T, hidden]. May overwrite ``hidden``."""
        normed = self.rms_norm(hidden, layer.input_norm, layer.eps)
        attended = self.attention_block(normed, layer.attention, layer.eps, context)
        if layer.attention_output_norm is not None:
            attended = self.rms_norm(attended, layer.attention_output_norm, layer.eps)
        hidden = hidden.add_(attended)
        transformed = self.mlp_block(self.rms_norm(hidden, layer.mlp_input_norm, layer.eps), layer.mlp)
        if layer.mlp_output_norm is not None:
            transformed = self.rms_norm(transformed, layer.mlp_output_norm, layer.eps)
        return hidden.add_(transformed)


class _ReferenceMetadata:
    def __init__(self, batch: AttentionBatch, device: torch.device) -> None:
        self.batch = batch
        self.slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
