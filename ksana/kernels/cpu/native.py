"""The entry points of the native library, by ctypes: structures that mirror ``csrc/abi.h``, and signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Of activations, and of plain weights."""

CACHE_DTYPES = {**DTYPES, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}

PLAIN, INT8, INT4 = range(3)
"""Formats of a packed weight."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""By the name in :class:`ksana.kernels.weights.GatedMLPWeights`."""

NORMS = ("input_norm", "mlp_input_norm", "attention_output_norm", "mlp_output_norm", "q_norm", "k_norm")
"""Of a layer, in the order of the structure."""


class LinearStruct(ctypes.Structure):
    """A projection. Nothing here owns memory: whoever makes one keeps what it points to."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("format", c_int32),
        ("group_size", c_int32),
        ("interleaved", c_int32),
    )


class LayerStruct(ctypes.Structure):
    """A decoder layer."""

    _fields_ = (
        *((name, c_void_p) for name in NORMS),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int64) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_size", "intermediate_size")),
        *((name, c_float) for name in ("eps", "scale", "soft_cap", "kv_scale")),
        ("activation", c_int32),
    )


class StepStruct(ctypes.Structure):
    """A step's batch for one KV cache group."""

    _fields_ = (
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables", "slot_mapping", "cos", "sin")),
        *((name, c_int64) for name in ("num_tokens", "num_requests", "block_table_stride", "block_size", "window")),
        ("cache_dtype", c_int32),
    )


_LINEAR, _LAYER, _STEP = POINTER(LinearStruct), POINTER(LayerStruct), POINTER(StepStruct)

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "best_level": (c_int, []),
    "level_name": (c_char_p, []),
    "set_level": (c_int, [c_int]),
    "set_threads": (c_int, [c_int]),
    "num_operators": (c_int, []),
    "operator_name": (c_char_p, [c_int]),
    "operator_seconds": (c_double, [c_int]),
    "packed_bytes": (c_int64, [c_int32, _LINEAR]),
    "pack": (None, [c_int32, _LINEAR, c_void_p, c_void_p]),
    "pack_codes": (None, [c_int32, _LINEAR, c_void_p, c_void_p, c_void_p, c_void_p]),
    "embed": (None, [c_int32, _LINEAR, c_void_p, c_int64, c_void_p]),
    "linear": (None, [c_int32, c_void_p, c_int64, _LINEAR, c_void_p]),
    "likeliest": (None, [c_int32, c_void_p, c_int64, _LINEAR, c_void_p, c_void_p]),
    "soft_cap": (None, [c_void_p, c_int64, c_float]),
    "rms_norm": (None, [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "write_kv": (None, [c_int32, _LAYER, _STEP, c_void_p, c_void_p]),
    "attention": (None, [c_int32, _LAYER, _STEP, c_void_p, c_void_p, c_void_p]),
    "decoder_layers": (None, [c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "argmax": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "exp_sums": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "draw": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "top_k": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
}


class NativeKernels:
    """Every entry point under its name without the prefix. Pointers are addresses of contiguous memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"ksana_cpu_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:  # for type checkers: all are set in __init__
        raise AttributeError(name)

    def operators(self) -> dict[str, float]:
        """Seconds by operator, since the library was loaded."""
        names = [self.operator_name(index).decode() for index in range(self.num_operators())]
        return {name: self.operator_seconds(index) for index, name in enumerate(names)}
