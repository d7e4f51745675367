"""The keys of the original engine's YAML file: those that mean something here, and why the others do not.

A key of the second kind passes with a value that asks for nothing (its default there), so that an existing file which
spells the defaults out still works. Anything else would be silently ignored, and is refused by name instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ksana.config.settings import Path


@dataclass(frozen=True, slots=True)
class MappedKey:
    """A key that sets one of our fields.

    Attributes:
        path: the field.
        convert: from the original's unit to ours; raises TypeError or ValueError. None as a result sets nothing.
    """

    path: Path
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """A key without a meaning here.

    Attributes:
        reason: what is missing, or what to use instead.
        harmless: values that ask for nothing.
    """

    reason: str
    harmless: tuple[Any, ...] = ()


def _milliseconds_to_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("must be a number of milliseconds")
    return value / 1000


def _memory_ratio(value: Any) -> Any:
    return None if value == -1 else value  # -1: the original's word for automatic


def _unless(default: Any) -> Callable[[Any], Any]:
    """The value, but nothing if it is what holds anyway."""
    return lambda value: None if value == default else value


def _preempt_mode(mode: Any) -> str:
    if isinstance(mode, bool) or mode not in (0, 1):
        raise ValueError("must be 0 (swap) or 1 (recompute)")
    return "recompute" if mode else "swap"


def _gigabytes_to_bytes(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("must be a number of gigabytes")
    if not 0 <= value < math.inf:  # nor NaN
        raise ValueError("must be a number of gigabytes, 0 or more")
    return int(value * 2**30) or None


def _collector(url: Any) -> str:
    if not isinstance(url, str):
        raise TypeError("must be a URL")
    return url.removesuffix("/").removesuffix("/v1/metrics")  # the original's is that of the metrics alone


def _attributes(value: Any) -> list[str]:
    if not isinstance(value, dict):
        raise TypeError("must hold names with values")
    return [f"{name}={text}" for name, text in value.items()]


def _speculative_method(enabled: Any) -> str | None:
    if not isinstance(enabled, bool):
        raise TypeError("must be true or false")
    return "trie" if enabled else None


_NO_TENSOR_PARALLEL = "tensor parallelism is not available in this version"
_NO_PIPELINE = "pipeline parallelism is not available in this version"
_NO_EXPERT = "expert parallelism is not available in this version"
_NO_DRAFT_LAYERS = "drafting with layers of the model is not available in this version; see speculation.method"
_NO_PD = "prefill and decode on separate nodes is not available in this version"
_NO_GPTQ = "weights quantised by GPTQ are not available in this version"
_OWN_QUANTIZATION = "the methods here are those of model.quantization: int8, int4, stored"
_ONE_SCHEDULER = "there is one scheduler, with continuous batching"
_ONE_STEP_AHEAD = "one step is planned ahead, with enable_async"
_NO_CUDA_KNOB = "it chooses a CUDA kernel; there is no CUDA backend in this version"
_PER_REQUEST = "it is an option of each request"


_GLOBAL = {
    "tensor_para_size": RefusedKey(_NO_TENSOR_PARALLEL, (0, 1)),
    "pipeline_para_size": RefusedKey(_NO_PIPELINE, (1,)),
    "attn_data_para_size": RefusedKey("attention data parallelism is not available in this version", (1,)),
    "expert_world_size": RefusedKey(_NO_EXPERT, (1,)),
    "expert_para_size": RefusedKey(_NO_EXPERT, (1,)),
    "enable_full_shared_expert": RefusedKey(_NO_EXPERT, (False,)),
    "moe_topk_score_threshold": RefusedKey(_NO_EXPERT, (0,)),
    "moe_all_to_all_mode": RefusedKey(_NO_EXPERT, ("auto",)),
    "deepep_low_latency_max_tokens": RefusedKey(_NO_EXPERT, (256,)),
    "embed_tokens_use_cpu": RefusedKey("the backend decides where weights live", (False,)),
    "enable_cuda_graph": RefusedKey(_NO_CUDA_KNOB, (False,)),
    "pipeline_para_comm_type": RefusedKey(_NO_PIPELINE, ("default",)),
    "enable_lora_adapter": RefusedKey("LoRA adapters are not available in this version", (False,)),
    "is_version_report": RefusedKey("nothing is reported to anybody", (True, False)),
}

_BATCH_SCHEDULER = {
    "waiting_timeout_in_ms": MappedKey(("scheduler", "waiting_timeout_s"), _milliseconds_to_seconds),
    "max_waiting_queue_len": MappedKey(("scheduler", "max_waiting_queue_len")),
    "max_token_len": MappedKey(("scheduler", "max_model_len")),
    "max_step_tokens": MappedKey(("scheduler", "max_num_batched_tokens")),
    "max_batch_size": MappedKey(("scheduler", "max_num_seqs")),
    "split_fuse_token_num": MappedKey(("scheduler", "split_fuse_token_num")),
    "enable_auto_prefix_cache": MappedKey(("cache", "enable_prefix_caching")),
    "schedule_strategy": RefusedKey(_ONE_SCHEDULER, (0,)),
    "scheduler_type": RefusedKey(_ONE_SCHEDULER, (0, 1)),  # 1: what the original needs for the global cache
    "pp_multibatch_wb_strategy": RefusedKey(_NO_PIPELINE, (0, "NO_WB")),
    "max_pretransfer_batch_size": RefusedKey(_NO_PD, (64,)),
    "transfer_layer_chunk_size": RefusedKey(_NO_PD, (1,)),
    "max_pp_batch_num": RefusedKey(_NO_PIPELINE, (1,)),
    "swapout_block_threshold": MappedKey(("scheduler", "swapout_block_threshold")),
    "swapin_block_threshold": MappedKey(("scheduler", "swapin_block_threshold")),
    "launch_block_threshold": MappedKey(("scheduler", "launch_block_threshold")),
    "preempt_mode": MappedKey(("scheduler", "preempt_mode"), _preempt_mode),
    "swap_threadpool_size": MappedKey(("cache", "swap_threads")),
    "min_flexible_cache_num": RefusedKey("flexible caching is not available in this version", (0,)),
    "enable_speculative_decoding": MappedKey(("speculation", "method"), _speculative_method),
    "speculative_method": RefusedKey("other methods than trie are named by speculation.method", ("", "trie")),
    "mtp_step_num": RefusedKey(_NO_DRAFT_LAYERS, (0,)),
    "enable_mtp_module": RefusedKey(_NO_DRAFT_LAYERS, (False,)),
    "enable_xgrammar": RefusedKey("structured output is always available", (False, True)),
    "enable_async": MappedKey(("scheduler", "enable_async")),
    "enable_executor_build_ahead": RefusedKey(_ONE_STEP_AHEAD, (False,)),
    "max_chunked_kv_tokens": RefusedKey("use max_step_tokens and split_fuse_token_num", (0,)),
    "attention_dp_lb_config.enable_balance": RefusedKey(_NO_TENSOR_PARALLEL, (False,)),
    "attention_dp_lb_config.max_waiting_steps": RefusedKey(_NO_TENSOR_PARALLEL, (50,)),
    "attention_dp_lb_config.max_waiting_time_in_ms": RefusedKey(_NO_TENSOR_PARALLEL, (1000,)),
    "attention_dp_lb_config.min_qps_for_waiting": RefusedKey(_NO_TENSOR_PARALLEL, (-1,)),
}

_BLOCK_MANAGER = {
    "block_token_num": MappedKey(("cache", "block_size")),
    "block_device_memory_ratio": MappedKey(("cache", "memory_fraction"), _memory_ratio),
    "reserved_device_memory_ratio": RefusedKey("use block_device_memory_ratio", (0.01,)),
    "block_host_memory_factor": MappedKey(("cache", "host_memory_factor")),
    "host_pool_size_gb": MappedKey(("cache", "host_max_bytes"), _gigabytes_to_bytes),
    "dynamic_reusable_memory_ratio": RefusedKey("blocks are shared by all requests as it is", (1,)),
    "enable_block_checksum": RefusedKey("block checksums are not available in this version", (False,)),
    "cache_manager.swa_block_num_ratio": MappedKey(("cache", "swa_block_num_ratio")),
    "cache_manager.enable_non_contiguous_swa_mode": RefusedKey(
        "blocks of a window never are contiguous", (False, True)
    ),
}

_OTHER_SETTINGS = {
    "attn_backend.enable_blocked_multi_token_forwarding_kv": RefusedKey(_NO_CUDA_KNOB, (False,)),
    "attn_backend.flash_attn_impl": RefusedKey(_NO_CUDA_KNOB, ("auto",)),
    "attn_backend.use_flashinfer_for_decode": RefusedKey(_NO_CUDA_KNOB, (False,)),
    "kernel_config.cublas.gemm_reduction_precision": RefusedKey(_NO_CUDA_KNOB),
    "quantization_config.gptq_backend": RefusedKey(_NO_GPTQ),
    "quantization_config.kv_cache.dtype": MappedKey(("cache", "kv_cache_dtype")),
    "quantization_config.weight.quant_method": RefusedKey(_OWN_QUANTIZATION, ("auto",)),
    "profiler.metrics_export_url": MappedKey(("telemetry", "otlp_endpoint"), _collector),
    "profiler.export_interval_millis": MappedKey(("telemetry", "otlp_interval_s"), _milliseconds_to_seconds),
    "profiler.export_timeout_millis": MappedKey(("telemetry", "otlp_timeout_s"), _milliseconds_to_seconds),
    "profiler.attributes": MappedKey(("telemetry", "otlp_attributes"), _attributes),
    "endpoint_type": RefusedKey("endpoints other than python come as plugins", ("python",)),
    "tokenization.tokenizer_path": MappedKey(("model", "tokenizer")),
    "tokenization.add_special_tokens": RefusedKey(_PER_REQUEST, (True,)),
    "tokenization.skip_special_tokens": RefusedKey(_PER_REQUEST, (True,)),
    "connector": RefusedKey(_NO_PD, ({}, {"group_role": "none"})),
}

_GLOBAL_CACHE_DEFAULTS = {
    "service_endpoint": "",
    "master_server_addr": "127.0.0.1:50051",
    "backend_type": "mooncake",
    "protocol": "tcp",
    "rdma_devices": "",
    "role": "",
    "timeout_ms": 5000,
    "max_retry": 3,
    "fetch_thread_num": 4,
    "global_segment_size": 16 << 20,
    "local_buffer_size": 16 << 20,
}
"""Of the options of ksana-mooncake. A file that spells them out works where that is not installed."""

_GLOBAL_CACHE = {
    name: MappedKey(("plugin_options", "mooncake", name), _unless(default))
    for name, default in _GLOBAL_CACHE_DEFAULTS.items()
}

_MODEL_SPEC = {
    "base_model.model_dir": MappedKey(("model", "model")),
    "base_model.tokenizer_dir": MappedKey(("model", "tokenizer")),
    "plugin_model.thread_pool_size": MappedKey(("model", "plugin_thread_pool_size")),
    "plugin_model.plugin_thread_pool_size": MappedKey(("model", "plugin_thread_pool_size")),
    "plugin_model.trust_remote_code": MappedKey(("model", "trust_remote_code")),
    "plugin_model.enable_tensorrt": RefusedKey("plugins bring their own runtime", (True, False)),
}


def _below(prefix: str, table: dict[str, Any]) -> dict[str, MappedKey | RefusedKey]:
    return {f"{prefix}.{key}": entry for key, entry in table.items()}


ORIGINAL_KEYS: dict[str, MappedKey | RefusedKey] = {
    **_below("setting.global", _GLOBAL),
    **_below("setting.batch_scheduler", _BATCH_SCHEDULER),
    **_below("setting.block_manager", _BLOCK_MANAGER),
    **_below("setting", _OTHER_SETTINGS),
    **_below("setting.global_cache_connector", _GLOBAL_CACHE),
    **_below("model_spec", _MODEL_SPEC),
}
"""Every key of the original by its dotted name."""
