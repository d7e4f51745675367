"""The CPU backend with native kernels: a layer is one call, and its results do not depend on the batch around them."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ksana.kernels.batch import AttentionBatch, KVCache, StepContext
from ksana.kernels.cpu.attention import CPUAttentionMetadata
from ksana.kernels.cpu.backend import CPUBackend
from ksana.kernels.cpu.huge_pages import HugePageArena
from ksana.kernels.cpu.layer_stack import LayerStack
from ksana.kernels.cpu.native import (
    ACTIVATIONS,
    CACHE_DTYPES,
    DTYPES,
    INT4,
    INT8,
    NORMS,
    PLAIN,
    LayerStruct,
    LinearStruct,
    NativeKernels,
    StepStruct,
)
from ksana.kernels.cpu.pages_ahead import PagesAhead
from ksana.kernels.quantization import QuantizedWeight, Weight
from ksana.kernels.weights import AttentionWeights, DecoderLayerWeights, Linear
from ksana.types.config import KernelConfig
from ksana.types.kv import KVCacheConfig

logger = logging.getLogger(__name__)

_PANEL = 32
_HALF_PANEL = 16

_FORMATS = {8: INT8, 4: INT4}
_GROUP_SIZE_MULTIPLES = {8: 2, 4: 4}
"""By the number of bits: formats, and what a group's size must be a multiple of."""


class NativeCPUBackend(CPUBackend):
    """See :class:`CPUBackend`. float16, which these kernels have not, is left to torch.

    Args:
        config: as for :class:`CPUBackend`. The kernels have threads of their own; torch gets one, for the little that
            is left to it: a second team of workers would take the processors from the first.
        kernels: of the loaded library.
    """

    name = "cpu"

    def __init__(self, config: KernelConfig, kernels: NativeKernels) -> None:
        super().__init__(config, torch_threads=1)
        self._kernels = kernels
        wanted, self.threads = self.threads, self._kernels.set_threads(self.threads)
        if self.threads < wanted:
            logger.warning("CPU backend: the system gives this process no more than %d threads", self.threads)
        self._arena = HugePageArena()
        self._pages: PagesAhead | None = None  # of the cache
        self._stack: LayerStack | None = None  # that was computed last
        self._operators_before = kernels.operators()
        logger.info("CPU backend: native kernels, %s", kernels.level_name().decode())

    def operator_seconds(self) -> dict[str, float]:
        before = self._operators_before
        return {name: seconds - before[name] for name, seconds in self._kernels.operators().items()}

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate_kv_cache(self, config: KVCacheConfig) -> KVCache:
        self._stack = None  # of another cache, which it would keep
        self._arena.reserve(config.num_bytes)
        cache = super().allocate_kv_cache(config)
        self._pages = PagesAhead(list(cache.tensors.values()))
        return cache

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    # -- weights -----------------------------------------------------------------------------------------------

    def pack_linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if weight.dtype not in DTYPES:
            torch.set_num_threads(self.threads)  # torch is going to compute after all
            return super().pack_linear(weight, bias)
        return self._pack(weight, bias, interleaved=False)

    def pack_tied_head(self, head: Linear) -> Linear:
        assert isinstance(head.weight, torch.Tensor), "a quantised head is no embedding"
        return self._packed(head) if head.weight.dtype in DTYPES else super().pack_tied_head(head)

    def pack_norm(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float() if weight.dtype in DTYPES else weight

    def pack_layer(self, layer: DecoderLayerWeights) -> None:
        self._stack = None
        gate_up = layer.mlp.gate_up
        if gate_up.weight is None or gate_up.weight.dtype not in DTYPES:
            super().pack_layer(layer)
            return
        layer.mlp.gate_up = self._pack(gate_up.weight, gate_up.bias, interleaved=True)
        attention, mlp = layer.attention, layer.mlp
        attention.qkv = self._packed(attention.qkv)
        attention.output = self._packed(attention.output)
        mlp.down = self._packed(mlp.down)
        norms = _norms(layer)
        struct = LayerStruct(
            **{name: norm.data_ptr() for name, norm in norms.items()},
            qkv=attention.qkv.packed.struct,
            output=attention.output.packed.struct,
            gate_up=mlp.gate_up.packed.struct,
            down=mlp.down.packed.struct,
            hidden_size=layer.input_norm.shape[0],
            **_attention_numbers(attention),
            intermediate_size=mlp.down.packed.struct.in_features,
            eps=layer.eps,
            activation=ACTIVATIONS[mlp.activation],
        )
        layer.packed = PackedLayer(struct, list(norms.values()))

    def _pack(self, weight: Weight, bias: torch.Tensor | None, *, interleaved: bool) -> Linear:
        if not _has_kernels(weight):
            weight = self._plain(weight)
        struct = LinearStruct(
            out_features=weight.shape[0], in_features=weight.shape[1], format=PLAIN, interleaved=interleaved
        )
        if isinstance(weight, QuantizedWeight):
            struct.format, struct.group_size = _FORMATS[weight.bits], weight.group_size
        dtype = DTYPES[weight.dtype]
        memory = self._arena.allocate(self._kernels.packed_bytes(dtype, ctypes.byref(struct)))
        if isinstance(weight, QuantizedWeight):
            codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
            minima = None if weight.minima is None else weight.minima.contiguous()
            self._kernels.pack_codes(
                dtype,
                ctypes.byref(struct),
                codes.data_ptr(),
                scales.data_ptr(),
                _address(minima),
                memory.data_ptr(),
            )
        else:
            weight = weight.contiguous()
            self._kernels.pack(dtype, ctypes.byref(struct), weight.data_ptr(), memory.data_ptr())
        struct.packed = memory.data_ptr()
        columns = None if bias is None else _columns_of(bias, interleaved=interleaved)
        struct.bias = _address(columns)
        return Linear(None, bias, PackedLinear(struct, memory, columns, weight.dtype))

    # -- operators ---------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if not isinstance(linear.packed, PackedLinear):
            return super().linear(x, linear)
        return self.logits(x, linear).to(x.dtype)

    def logits(self, x: torch.Tensor, head: Linear, soft_cap: float = 0.0) -> torch.Tensor:
        if not isinstance(head.packed, PackedLinear):
            return super().logits(x, head, soft_cap)
        x, struct = x.contiguous(), head.packed.struct
        product = torch.empty(x.shape[0], struct.out_features, dtype=torch.float32)
        self._kernels.linear(DTYPES[x.dtype], x.data_ptr(), x.shape[0], ctypes.byref(struct), product.data_ptr())
        if soft_cap:
            self._kernels.soft_cap(product.data_ptr(), product.numel(), soft_cap)
        return product

    def embed(self, token_ids: torch.Tensor, embedding: Linear) -> torch.Tensor:
        packed = embedding.packed
        if not isinstance(packed, PackedLinear):
            return super().embed(token_ids, embedding)
        token_ids = token_ids.contiguous()
        rows = torch.empty(len(token_ids), packed.struct.in_features, dtype=packed.dtype)
        self._kernels.embed(
            DTYPES[packed.dtype], ctypes.byref(packed.struct), token_ids.data_ptr(), len(token_ids), rows.data_ptr()
        )
        return rows

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES:
            return super().rms_norm(x, weight, eps)
        x, weight = x.contiguous(), weight.float()
        out, size = torch.empty_like(x), x.shape[-1]
        self._kernels.rms_norm(
            DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr()
        )
        return out

    # -- sampling ----------------------------------------------------------------------------------------------

    def argmax(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        logits = logits.contiguous()
        rows, vocab_size = logits.shape
        tokens, finite = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.bool_)
        self._kernels.argmax(logits.data_ptr(), rows, vocab_size, tokens.ctypes.data, finite.ctypes.data)
        return tokens, finite

    def likeliest(self, x: torch.Tensor, head: Linear, soft_cap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(head.packed, PackedLinear) or soft_cap:  # which may make equals of two
            return super().likeliest(x, head, soft_cap)
        x, rows = x.contiguous(), len(x)
        tokens, finite = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.bool_)
        self._kernels.likeliest(
            DTYPES[x.dtype],
            x.data_ptr(),
            rows,
            ctypes.byref(head.packed.struct),
            tokens.ctypes.data,
            finite.ctypes.data,
        )
        return tokens, finite

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        logits = logits.contiguous()
        rows, vocab_size = logits.shape
        values, tokens = np.empty((rows, k), dtype=np.float32), np.empty((rows, k), dtype=np.int64)
        self._kernels.top_k(logits.data_ptr(), rows, vocab_size, k, values.ctypes.data, tokens.ctypes.data)
        return values, tokens

    def exp_sums(self, logits: torch.Tensor, temperatures: np.ndarray) -> np.ndarray:
        logits = logits.contiguous()
        temperatures = np.ascontiguousarray(temperatures, dtype=np.float32)
        sums = np.empty(len(logits), dtype=np.float64)
        self._kernels.exp_sums(logits.data_ptr(), *logits.shape, temperatures.ctypes.data, sums.ctypes.data)
        return sums

    def draw(
        self, logits: torch.Tensor, temperatures: np.ndarray, min_ps: np.ndarray, uniforms: np.ndarray
    ) -> np.ndarray:
        logits = logits.contiguous()
        temperatures, min_ps = (np.ascontiguousarray(a, dtype=np.float32) for a in (temperatures, min_ps))
        uniforms = np.ascontiguousarray(uniforms, dtype=np.float64)
        tokens = np.empty(len(logits), dtype=np.int64)
        self._kernels.draw(
            logits.data_ptr(),
            *logits.shape,
            temperatures.ctypes.data,
            min_ps.ctypes.data,
            uniforms.ctypes.data,
            tokens.ctypes.data,
        )
        return tokens

    # -- attention ---------------------------------------------------------------------------------------------

    def build_attention_metadata(self, batch: AttentionBatch) -> NativeAttentionMetadata:
        if self._pages is not None:
            self._pages.reach(int(batch.slot_mapping.max(initial=0)) // batch.block_size)
        return NativeAttentionMetadata(batch)

    def write_kv(self, cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor, scale: float = 1.0) -> None:
        if kv.dtype not in DTYPES:
            super().write_kv(cache, slots, kv, scale)
            return
        kv, slots = kv.contiguous(), slots.contiguous()
        layer = LayerStruct(num_kv_heads=kv.shape[1] // 2, head_size=kv.shape[2], kv_scale=scale)
        step = StepStruct(
            slot_mapping=slots.data_ptr(),
            num_tokens=len(kv),
            block_size=cache.shape[1],
            cache_dtype=CACHE_DTYPES[cache.dtype],
        )
        self._kernels.write_kv(
            DTYPES[kv.dtype], ctypes.byref(layer), ctypes.byref(step), kv.data_ptr(), cache.data_ptr()
        )

    def attention(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        weights: AttentionWeights,
    ) -> torch.Tensor:
        if query.dtype not in DTYPES:
            return super().attention(query, kv, cache, metadata.for_torch, weights)
        query = query.contiguous()
        output = torch.empty_like(query)
        layer = LayerStruct(**_attention_numbers(weights))
        self._kernels.attention(
            DTYPES[query.dtype],
            ctypes.byref(layer),
            ctypes.byref(metadata.struct(cache.dtype)),
            query.data_ptr(),
            cache.data_ptr(),
            output.data_ptr(),
        )
        return output

    def decoder_layers(
        self,
        hidden: torch.Tensor,
        layers: Sequence[DecoderLayerWeights],
        context: StepContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        stack = self._stack
        if stack is None or not stack.is_of(layers, context.cache):
            if any(layer.packed is None for layer in layers):
                return super().decoder_layers(hidden, layers, context, rows)
            stack = self._stack = LayerStack(layers, context.cache)
        self._kernels.decoder_layers(
            DTYPES[hidden.dtype],
            stack.layer_pointers,
            stack.step_pointers(context),
            stack.cache_pointers,
            len(stack),
            None if rows is None else rows.data_ptr(),
            -1 if rows is None else len(rows),
            hidden.data_ptr(),
        )
        return hidden if rows is None or len(rows) == len(hidden) else hidden[: len(rows)]

    def decoder_layer(self, hidden: torch.Tensor, layer: DecoderLayerWeights, context: StepContext) -> torch.Tensor:
        return (
            self.decoder_layers(hidden, [layer], context)
            if layer.packed
            else super().decoder_layer(hidden, layer, context)
        )


class PackedLinear:
    """A projection's structure, with the memory that it points to.

    Attributes:
        struct: for the kernels.
        dtype: of the activations that it is multiplied with.
    """

    __slots__ = ("_bias", "_memory", "dtype", "struct")

    def __init__(
        self, struct: LinearStruct, memory: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.struct = struct
        self.dtype = dtype
        self._memory = memory
        self._bias = bias


class PackedLayer:
    """A layer's structure, with the norms that it points to."""

    __slots__ = ("_norms", "struct")

    def __init__(self, struct: LayerStruct, norms: list[torch.Tensor]) -> None:
        self.struct = struct
        self._norms = norms


class NativeAttentionMetadata:
    """The arrays of a step's batch for one KV cache group, kept for as long as the structure points to them."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._block_tables = np.ascontiguousarray(batch.block_tables)
        self._rotary: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._structs: dict[tuple[torch.dtype, int | None], StepStruct] = {}
        self.slot_mapping = torch.from_numpy(batch.slot_mapping)

    @functools.cached_property
    def for_torch(self) -> CPUAttentionMetadata:
        """The same for torch's operators."""
        return CPUAttentionMetadata(self._batch)

    def struct(self, cache_dtype: torch.dtype, context: StepContext | None = None, rotary_index: int = 0) -> StepStruct:
        """The structure, the same object for all layers of a step that have the same rotary embedding.

        Without a context it is for kernels that rotate nothing.
        """
        key = cache_dtype, None if context is None else rotary_index
        struct = self._structs.get(key)
        if struct is None:
            batch = self._batch
            if context is not None:  # and not all of the context, which holds this too: a cycle would stay for long
                self._rotary = context.rotary
            cos, sin = (None, None) if context is None else (t.data_ptr() for t in context.rotary[rotary_index])
            struct = self._structs[key] = StepStruct(
                query_starts=batch.query_starts.ctypes.data,
                context_lens=batch.context_lens.ctypes.data,
                block_tables=self._block_tables.ctypes.data,
                slot_mapping=batch.slot_mapping.ctypes.data,
                cos=cos,
                sin=sin,
                num_tokens=len(batch.slot_mapping),
                num_requests=len(batch.context_lens),
                block_table_stride=self._block_tables.shape[1],
                block_size=batch.block_size,
                window=batch.sliding_window or 0,
                cache_dtype=CACHE_DTYPES[cache_dtype],
            )
        return struct


def _norms(layer: DecoderLayerWeights) -> dict[str, torch.Tensor]:
    """Those that the layer has, by their names in the structure; float32."""
    every = (
        layer.input_norm,
        layer.mlp_input_norm,
        layer.attention_output_norm,
        layer.mlp_output_norm,
        layer.attention.q_norm,
        layer.attention.k_norm,
    )
    return {name: norm.float() for name, norm in zip(NORMS, every, strict=True) if norm is not None}


def _attention_numbers(weights: AttentionWeights) -> dict[str, float]:
    """Fields of a layer's structure. Scores are scaled anyhow, so the keys' factor costs them nothing."""
    return {
        "num_heads": weights.num_heads,
        "num_kv_heads": weights.num_kv_heads,
        "head_size": weights.head_size,
        "scale": weights.scale * weights.kv_scale,
        "soft_cap": weights.soft_cap,
        "kv_scale": weights.kv_scale,
    }


def _has_kernels(weight: Weight) -> bool:
    """Whether it can be multiplied as it is.

    Pairs of inner elements are multiplied at once: an odd number of them is only handled in plain weights. Integers of
    8 bits are kept as signs and magnitudes, among which -128 is not: no usual rounding makes it.
    """
    if isinstance(weight, torch.Tensor):
        return True
    if weight.shape[1] % 2 != 0 or weight.group_size % _GROUP_SIZE_MULTIPLES[weight.bits] != 0:
        return False
    return weight.bits != 8 or weight.codes.numel() == 0 or int(weight.codes.min()) > -128


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _columns_of(bias: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The bias as float32 in the order of the packed columns, filled up with zeros."""
    bias = bias.float()
    if not interleaved:
        return torch.nn.functional.pad(bias, (0, -len(bias) % _PANEL))
    half = len(bias) // 2
    halves = torch.nn.functional.pad(bias.view(2, half), (0, -half % _HALF_PANEL))
    return halves.view(2, -1, _HALF_PANEL).transpose(0, 1).reshape(-1)
