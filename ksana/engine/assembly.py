"""Builds the parts of an engine out of the configuration and what plugins contribute.

Whatever loads torch is imported where it is first needed: that takes longer than all the rest of a start, and the
readers of weight files use the time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ksana.engine.compute_thread import ComputeThread
from ksana.engine.context import ProcessingContext
from ksana.engine.core import EngineCore
from ksana.engine.free_memory import return_free_memory
from ksana.engine.kv_connectors import create_kv_connector
from ksana.engine.kv_events import KVEventStream, open_event_stream
from ksana.engine.output_processor import OutputProcessor
from ksana.engine.trace import EngineTrace, NoTrace
from ksana.errors import ModelLoadError, UsageError
from ksana.kernels.selection import KernelBackendInfo, select_backend
from ksana.kv import KVCacheManager
from ksana.kv.observer import KVCacheObserver
from ksana.models.kv_scales import load_kv_scales
from ksana.models.locate import resolve_model
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.model_dir import find_model_dir_plugin, register_model_dir_plugin
from ksana.scheduling import Scheduler
from ksana.scheduling.drafter import Drafter
from ksana.scheduling.speculation import Speculator
from ksana.text.chat_template import ChatTemplate
from ksana.text.tokenizer import Tokenizer
from ksana.types.config import CacheConfig, KsanaConfig, SpeculationConfig
from ksana.types.kv import KVCacheConfig
from ksana.types.model import ModelConfig

if TYPE_CHECKING:
    from ksana.kernels.base import KernelBackend
    from ksana.kernels.quantization import Weight
    from ksana.models.base import Model
    from ksana.worker.logits_processor import LogitsProcessors
    from ksana.worker.model_runner import ModelRunner

    Weights = Iterable[tuple[str, Weight]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine front stands on: the step loop, and the loaded model as hooks and admission see it.

    Attributes:
        runner: what the core computes its steps with, for those who bring a scheduler of their own.
    """

    core: EngineCore
    context: ProcessingContext
    runner: ModelRunner


def assemble(config: KsanaConfig, plugins: KsanaPluginManager) -> EngineParts:
    """Load the model and build the engine around it. Takes seconds; says on the way what it does.

    Raises:
        UsageError: something about the model, the configuration or a plugin is wrong.
    """
    path = config.telemetry.trace
    trace = EngineTrace(path) if path else NoTrace()  # first of all: loading takes long, a wrong path does not
    thread = ComputeThread() if config.scheduler.enable_async else None
    events: KVEventStream | None = None
    try:
        events = open_event_stream(config.kv_events, plugins)
        if thread is None:
            return _assemble(config, plugins, trace, events, None)
        return thread.submit(lambda: _assemble(config, plugins, trace, events, thread)).result()
    except BaseException:
        if thread is not None:
            thread.stop()
        if events is not None:
            events.publisher.close()
        trace.close()
        raise


def _assemble(
    config: KsanaConfig,
    plugins: KsanaPluginManager,
    trace: NoTrace,
    events: KVEventStream | None,
    compute_thread: ComputeThread | None,
) -> EngineParts:
    """Build everything, on the thread that is to compute."""
    started = time.monotonic()
    path = resolve_model(config.model.model)
    model_plugin = find_model_dir_plugin(path, config.model, config.config_file)
    if model_plugin is not None:
        register_model_dir_plugin(plugins, model_plugin)
    model_config = _load_model_config(path, config, plugins)
    wanted, possible = config.scheduler.max_model_len, model_config.max_model_len
    if wanted > possible:
        raise UsageError(
            f"--max-model-len {wanted} is more than the {possible} tokens {model_config.name} was made for"
        )
    speculator = _create_speculator(config.speculation, plugins)
    weights = _open_weights(path, model_config, plugins)
    tokenizer, chat_template = _create_text(path, model_config, config, plugins)
    from ksana.worker.cache_size import check_kv_cache_dtype, plan_kv_cache
    from ksana.worker.model_runner import ModelRunner

    backend = _create_backend(config, plugins)
    check_kv_cache_dtype(model_config, config.cache, backend)
    model = _load_model(path, model_config, backend, weights, plugins)
    max_model_len = wanted or possible
    kv_config = plan_kv_cache(
        model_config,
        config.cache,
        config.scheduler,
        max_model_len=max_model_len,
        available_memory=backend.available_memory,
    )
    recorder = None if events is None else events.recorder(kv_config)
    kv = _create_kv_manager(config.cache, kv_config, recorder)
    connector = create_kv_connector(config, model_config, path, kv_config, backend.name, plugins)
    scheduler_side = None if connector is None else connector.create_scheduler(kv)
    scheduler = Scheduler(
        config.scheduler, kv, speculator=speculator, connector=scheduler_side, transfer_config=config.kv_transfer
    )
    max_model_len = _fit_to_cache(max_model_len, scheduler)
    cache = backend.allocate_kv_cache(kv_config)
    worker_side = None if connector is None else connector.create_worker(cache)
    runner = ModelRunner(
        model,
        backend,
        cache,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        processors=_create_processors(model_config, tokenizer, plugins),
        connector=worker_side,
    )
    outputs = OutputProcessor(tokenizer)
    core = EngineCore(
        scheduler,
        runner,
        outputs,
        plugins.hook,
        check_integrity=config.cache.check_integrity,
        compute_thread=compute_thread,
        trace=trace,
        events=recorder,
        closing=[side.shutdown for side in (scheduler_side, worker_side) if side is not None],
    )
    return_free_memory()
    logger.info("engine ready in %.1f s, for up to %d tokens a request", time.monotonic() - started, max_model_len)
    context = ProcessingContext(config, model_config, path, max_model_len, tokenizer, chat_template)
    return EngineParts(core, context, runner)


def _load_model_config(path: Path, config: KsanaConfig, plugins: KsanaPluginManager) -> ModelConfig:
    model_config: ModelConfig | None = plugins.hook.ksana_load_model_config(model_path=path, options=config.model)
    if model_config is None:
        raise ModelLoadError(f"no plugin knows the kind of model at {path}: neither a config.json nor a GGUF file")
    logger.info("model %s: %s in %s, from %s", model_config.name, model_config.architecture, model_config.dtype, path)
    options = config.model
    return replace(
        model_config,
        quantization=options.quantization,
        quantization_group_size=options.quantization_group_size,
        kv_scales=load_kv_scales(path, config.cache, model_config.num_layers),
    )


def _create_text(
    path: Path, model_config: ModelConfig, config: KsanaConfig, plugins: KsanaPluginManager
) -> tuple[Tokenizer, ChatTemplate | None]:
    source = Path(config.model.tokenizer) if config.model.tokenizer else path
    if not source.exists():
        raise UsageError(f"--tokenizer {source} does not exist")
    tokenizer: Tokenizer | None = plugins.hook.ksana_create_tokenizer(model_path=source, config=model_config)
    if tokenizer is None:
        raise ModelLoadError(f"no plugin finds a tokenizer at {source}; name a folder that has one with --tokenizer")
    if config.model.chat_template:
        text = _template_text(config.model.chat_template)
        return tokenizer, ChatTemplate(text, tokenizer.bos_token, tokenizer.eos_token)
    chat_template: ChatTemplate | None = plugins.hook.ksana_create_chat_template(model_path=source, config=model_config)
    return tokenizer, chat_template


def _template_text(given: str) -> str:
    """The operator's template, from its file if ``given`` is not the text itself."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UsageError(f"--chat-template {given} cannot be read: {reason}") from None


def _create_backend(config: KsanaConfig, plugins: KsanaPluginManager) -> KernelBackend:
    infos: list[KernelBackendInfo] = []
    plugins.hook.ksana_kernel_backends(register=infos.append)
    return select_backend(infos, config.kernel.backend).create(config.kernel)


def _open_weights(path: Path, config: ModelConfig, plugins: KsanaPluginManager) -> Weights:
    """Ask for the weights early: a reader may begin to work at once, beside all that follows."""
    weights: Weights | None = plugins.hook.ksana_iter_weights(model_path=path, config=config)
    if weights is None:
        raise ModelLoadError(f"no plugin finds weights at {path}: expected safetensors, PyTorch .bin or GGUF")
    return weights


def _load_model(
    path: Path, config: ModelConfig, backend: KernelBackend, weights: Weights, plugins: KsanaPluginManager
) -> Model:
    from ksana.models.loader import load_weights

    model: Model | None = plugins.hook.ksana_create_model(config=config, backend=backend)
    if model is None:
        raise ModelLoadError(f"no plugin builds models of architecture {config.architecture} ({path})")
    try:
        load_weights(model, weights, progress=sys.stderr is not None and sys.stderr.isatty())
    except ModelLoadError as error:
        # Readers name the file; what only shows against the model's shape is not one file's fault.
        raise error if str(path) in str(error) else ModelLoadError(f"{path}: {error}") from error
    return model


def _create_processors(
    model_config: ModelConfig, tokenizer: Tokenizer, plugins: KsanaPluginManager
) -> LogitsProcessors:
    from ksana.worker.logits_processor import LogitsProcessors
    from ksana.worker.processors.grammar import GrammarProcessor

    contributed = plugins.hook.ksana_create_logits_processors(model_config=model_config, tokenizer=tokenizer)
    # The plugin that was registered first is called last.
    processors = [processor for own in reversed(contributed) for processor in own]
    # A grammar comes last: nothing after it may lift its bans.
    return LogitsProcessors([*processors, GrammarProcessor(model_config.vocab_size)])


def _create_speculator(config: SpeculationConfig, plugins: KsanaPluginManager) -> Speculator | None:
    if config.method == "none":
        return None
    drafter: Drafter | None = plugins.hook.ksana_create_drafter(config=config)
    if drafter is None:
        raise UsageError(f"no plugin has the method of --speculative {config.method}; built in are ngram and trie")
    return Speculator(drafter, config)


def _create_kv_manager(
    cache: CacheConfig, kv_config: KVCacheConfig, observer: KVCacheObserver | None
) -> KVCacheManager:
    return KVCacheManager(
        kv_config,
        enable_prefix_caching=cache.enable_prefix_caching,
        hash_seed=cache.prefix_hash_seed,
        observer=observer,
    )


def _fit_to_cache(max_model_len: int, scheduler: Scheduler) -> int:
    """A request that could never fit the cache must be refused when it comes, so the limit is lowered here."""
    fitting = scheduler.kv.max_request_tokens(max_model_len, scheduler.max_uncommitted)
    if fitting < 2:
        raise UsageError("the KV cache is too small for a single token; raise --num-blocks")
    if fitting < max_model_len:
        logger.warning("the KV cache lowers the longest request from %d to %d tokens", max_model_len, fitting)
    return fitting
