"""The typed configuration, in the parts that subsystems receive. Values arrive merged; see ``ksana.config``.

Pydantic validates. Every field says what it means, in which unit, and the key of the original engine's YAML file where
there is one. No part knows another: whoever needs two receives two.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr


def _split(value: object) -> object:
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Several strings; a single one, as the environment has it, is divided at commas."""

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-fA-F:.]+\]|[^\s/:?#@]+)(:\d+)?")


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} must be like https://example.com or http://localhost:3000, without a path, or *"
            )
    return origins


Origins = Annotated[Strings, AfterValidator(_check_origins)]
"""Origins of web pages, as browsers write them, or ``*``."""

Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split)]
"""The same for what must not be shown."""


class ConfigPart(BaseModel):
    """Base of all parts: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelOptions(ConfigPart):
    """Which model, and how to load it."""

    model: str = Field("", description="demo, a folder, a .gguf file or a hub name")
    tokenizer: str = Field("", description="folder of the tokenizer, if not the model's own")
    chat_template: str = Field("", description="file of the chat template, or its text, if not the model's own")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="dtype of weights and cache")
    quantization: Literal["none", "int8", "int4", "stored"] = Field(
        "none",
        description="weights in memory: none unpacks all to dtype; int8 and int4 round those of projections while they "
        "are loaded, stored keeps those that a GGUF file holds quantised: less memory, and few requests decode faster",
    )
    quantization_group_size: int = Field(
        64,
        ge=32,
        le=256,
        multiple_of=32,
        description="weights that share a scale under int8 and int4; fewer are more exact",
    )
    served_model_name: str = Field("", description="name that clients use; default: the folder's or file's name")
    trust_remote_code: bool = Field(False, description="run ksana_plugin.py from the model's folder")
    plugin_thread_pool_size: int = Field(1, ge=1, le=32, description="threads for the model folder's plugin")


class SchedulerConfig(ConfigPart):
    """Limits of a step and of the queue."""

    max_num_batched_tokens: int = Field(
        2176, ge=1, description="token budget of one step; 2,048 of prompts beside 128 requests that decode"
    )
    max_mixed_prefill_tokens: int = Field(
        128,
        ge=0,
        description="most tokens of a step that both decodes and computes long prompts, which get a quarter of it at "
        "least; 0: no limit",
    )
    long_prefill_token_threshold: int = Field(
        256,
        ge=0,
        description="a prompt with no more tokens left to compute is not long: it goes whole into a step, also beside "
        "those who decode; 0: every prompt is long",
    )
    max_num_seqs: int = Field(128, ge=1, le=65_536, description="most requests running at once")
    max_model_len: int = Field(0, ge=0, description="most tokens of prompt and output; 0: what the model allows")
    split_fuse_token_num: int = Field(0, ge=0, description="most prompt tokens of one request in a step; 0: no limit")
    max_waiting_queue_len: int = Field(1200, ge=1, description="requests that may wait; more are refused with 429")
    waiting_timeout_s: float = Field(600.0, gt=0, description="seconds a request may wait before it first runs")
    policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of the waiting queue")
    enable_async: bool = Field(False, description="schedule the next step while the present one computes")
    preempt_mode: Literal["swap", "recompute"] = Field(
        "swap",
        description="what becomes of a request that gives up its blocks: swap keeps them in host blocks, if there are "
        "any and they have room; recompute computes them again",
    )
    swapout_block_threshold: float = Field(
        1.0, ge=0, le=1000, description="free blocks for each running request below which the last one is swapped out"
    )
    swapin_block_threshold: float = Field(
        2.0, ge=0, le=1000, description="blocks that stay free for each running request when one is swapped in"
    )
    launch_block_threshold: float = Field(
        2.0, ge=0, le=1000, description="blocks that stay free for each running request when a waiting one is admitted"
    )


class SpeculationConfig(ConfigPart):
    """Speculative decoding: tokens are guessed, and several of them verified in one step."""

    method: str = Field(
        "none",
        description="who guesses: none, ngram (looks into the request itself), trie (also into other answers), or a "
        "plugin's",
    )
    num_speculative_tokens: int = Field(12, ge=1, le=64, description="most tokens guessed for a request at a time")
    max_requests: int = Field(32, ge=1, description="no guesses in steps of more requests than this")
    step_overhead: float = Field(
        16.0,
        gt=0,
        le=10_000,
        description="what a step costs beside its tokens, in tokens: the more, the longer are guesses that still pay",
    )
    min_ngram: int = Field(2, ge=1, le=32, description="ngram: shortest sequence of tokens that is recognised")
    max_ngram: int = Field(4, ge=1, le=32, description="ngram: longest sequence of tokens that is compared")
    trie_nodes: int = Field(
        500_000, ge=1000, le=100_000_000, description="trie: nodes of the tree of answers, about 110 bytes each"
    )


class GrammarConfig(ConfigPart):
    """Structured output."""

    grammar_timeout_s: float = Field(10.0, gt=0, description="seconds a request waits for its grammar to be compiled")
    max_cached_grammars: int = Field(128, ge=1, description="compiled grammars kept for requests to come")


class CacheConfig(ConfigPart):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=1024, description="tokens per block")
    num_blocks: int = Field(0, ge=0, description="blocks, beside those of sliding windows; 0: from memory")
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="dtype of keys and values; auto: the model's; fp8 takes a byte each"
    )
    kv_cache_scales: str = Field(
        "",
        description="fp8_e4m3: file of what each layer's keys and values are divided by; default: kv_cache_scales.json "
        "in the model's folder",
    )
    memory_fraction: float = Field(0.5, gt=0, le=1, description="share of the free memory to use for the cache")
    max_bytes: int = Field(4 * 2**30, ge=1, description="upper limit of the cache in bytes when sized from memory")
    enable_prefix_caching: bool = Field(True, description="reuse the blocks of equal prefixes")
    check_integrity: bool = Field(False, description="verify all block tables whenever the engine falls idle")
    prefix_hash_seed: str = Field("ksana", description="root of the chained block hashes; equal seeds, equal hashes")
    swa_block_num_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="blocks of sliding-window layers for each block of full-attention layers; 0: as many as the "
        "windows of all running requests take",
    )
    host_memory_factor: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="size of the host blocks, which keep what preempted requests and evicted prefixes had in the "
        "cache, as a multiple of the cache; 0: none",
    )
    host_max_bytes: int = Field(0, ge=0, description="upper limit of the host blocks in bytes; 0: none")
    swap_threads: int = Field(2, ge=1, le=64, description="threads that copy between the cache and host blocks")


class KVTransferConfig(ConfigPart):
    """KV connectors: blocks that leave this engine's cache, and come back."""

    connectors: Strings = Field(
        (), description="KV connectors, nearest first: local_disk, or one of a plugin; may be repeated"
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute", description="what becomes of a request whose blocks could not be loaded"
    )
    load_timeout_s: float = Field(10.0, ge=0.01, description="seconds a request waits for its blocks to be loaded")
    free_timeout_s: float = Field(
        60.0, ge=0.01, description="seconds that blocks of an ended request are kept for a connector that reads them"
    )
    disk_path: str = Field("", description="local_disk: folder for blocks; default: a folder in the user's cache")
    disk_max_bytes: int = Field(8 * 2**30, ge=2**20, description="local_disk: most bytes of blocks in the folder")


class KVEventsConfig(ConfigPart):
    """What the cache tells others about its content, for routers. It includes the token ids of all prompts."""

    publisher: str = Field("none", description="who tells it: none, zmq, nats, or a plugin's")
    endpoint: str = Field(
        "",
        description="zmq: address to bind, default tcp://127.0.0.1:5557; nats: server, default nats://127.0.0.1:4222",
    )
    replay_endpoint: str = Field(
        "", description="zmq: address to bind for those who have missed something; default: the next port"
    )
    topic: str = Field("", description="zmq: topic of all messages; nats: subject, default ksana.kv_events")
    buffer_steps: int = Field(
        10_000, ge=1, le=1_000_000, description="batches of events kept for those who have missed them, 64 MiB at most"
    )
    hwm: int = Field(
        10_000, ge=1, le=1_000_000, description="zmq: batches that may wait for one consumer; more it must ask for"
    )


class KernelConfig(ConfigPart):
    """The device."""

    backend: str = Field("auto", description="kernel backend; auto takes the best one that works")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads; 0: what the machine or container grants")


class ServerConfig(ConfigPart):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8080, ge=0, le=65535, description="port to bind; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    access_log: bool = Field(True, description="log one line a request")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="largest request body")
    max_concurrent_requests: int = Field(
        0, ge=0, description="most requests in work at once; more are refused with 429; 0: no limit but the queue's"
    )
    api_keys: Secrets = Field(
        (),
        description="key that clients must send; may be repeated. Other users of the machine can read a command line: "
        "rather use --api-key-file or the environment variable KSANA_API_KEY",
    )
    api_key_file: str = Field("", description="file of such keys, one a line; a line that begins with # is a comment")
    public_health: bool = Field(False, description="answer /health and /ready without a key")
    public_metrics: bool = Field(False, description="answer /metrics without a key")
    ssl_certfile: str = Field("", description="certificate, with its chain, in PEM; with it the server speaks HTTPS")
    ssl_keyfile: str = Field("", description="private key of the certificate in PEM, if not in the same file")
    ssl_keyfile_password_file: str = Field("", description="file whose first line decrypts the private key")
    ssl_ca_certs: str = Field("", description="certificates in PEM; clients must show one that these have signed")
    cors_origins: Origins = Field(
        (), description="origin of web pages that may use the server, as https://example.com; * is any; may be repeated"
    )
    shutdown_timeout_s: float = Field(30.0, ge=0, description="seconds that running requests get after SIGTERM")


class TelemetryConfig(ConfigPart):
    """What the engine tells about its work."""

    trace: str = Field("", description="file for a trace of steps and requests, for ui.perfetto.dev; replaced")
    otlp_endpoint: str = Field(
        "",
        description="OpenTelemetry collector for metrics and spans of requests, as http://collector:4318; debug prints "
        "them",
    )
    otlp_interval_s: float = Field(60.0, gt=0, description="seconds between two pushes of metrics")
    otlp_timeout_s: float = Field(5.0, gt=0, le=60, description="seconds that a push may take, retries included")
    otlp_attributes: Strings = Field((), description="NAME=VALUE, an attribute of all that is pushed; may be repeated")


class PluginConfig(ConfigPart):
    """Which plugins to load."""

    plugins: tuple[str, ...] = Field((), description="modules to load; no:NAME keeps a plugin out")
    autoload: bool = Field(True, description="load installed plugins by their entry points")


class KsanaConfig(ConfigPart):
    """Everything, composed."""

    model: ModelOptions = ModelOptions()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    grammar: GrammarConfig = GrammarConfig()
    cache: CacheConfig = CacheConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    kernel: KernelConfig = KernelConfig()
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    plugins: PluginConfig = PluginConfig()
    config_file: str = Field("", description="the YAML file that was read, if any; not itself a setting")
    plugin_options: dict[str, dict[str, object]] = Field(
        default_factory=dict, description="options that plugins have added, by plugin"
    )
