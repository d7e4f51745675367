"""The engine as servers use it: requests come and go on event loops, steps run on a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ksana.engine.admission import Admission
from ksana.engine.assembly import assemble
from ksana.engine.context import ProcessingContext
from ksana.engine.core import EngineCore
from ksana.engine.grammars import GrammarCache
from ksana.engine.keywords import configure
from ksana.engine.output_processor import OutputDelta
from ksana.engine.step_loop import StepLoop
from ksana.engine.stream import RequestStream
from ksana.errors import EngineDeadError, RequestError
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.maybe_await import call_in_order
from ksana.scheduling import queue_full_error
from ksana.text.chat_template import ChatTemplate
from ksana.text.grammar import GrammarCompiler
from ksana.text.tokenizer import Tokenizer
from ksana.types.config import KsanaConfig
from ksana.types.model import ModelConfig
from ksana.types.request import Request, RequestDraft
from ksana.types.stats import EngineSnapshot

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS = 4096
"""Prompt characters tokenised in one turn of the event loop. What goes beyond is tokenised in threads: the loop must
stay responsive, be it one long prompt or a thousand short ones."""

_INLINE_OVERHEAD = 64
"""What tokenising a prompt costs beside its length, in characters."""

_POLL_INTERVAL_S = 0.02

_COMMAND_TIMEOUT_S = 60.0
"""For the engine's thread to come to a command between two steps."""


class AsyncEngine:
    """Serves requests until stopped. Make one with :meth:`load`, or with :meth:`start` from a whole configuration.

    Example::

        engine = await asyncio.to_thread(AsyncEngine.load, "demo")
        async with await engine.submit(RequestDraft(prompt="Once upon a time")) as stream:
            async for output in stream:
                print(output.text_delta, end="")
        await engine.stop("done")

    ``submit`` and the streams belong to event loops (any number of them); the step loop is a thread that alone touches
    the core. They talk through one inbox and ``call_soon_threadsafe``, once a step.
    """

    def __init__(self, loop: StepLoop, context: ProcessingContext, plugins: KsanaPluginManager) -> None:
        self.context = context
        self.plugin_manager = plugins
        self._admission = Admission(context)
        self._grammars = GrammarCache(self._create_grammar_compiler, context.config.grammar)
        self._streams: dict[str, RequestStream] = {}
        self._entering: set[object] = set()  # one entry for each draft on its way to a stream
        self._dead: EngineDeadError | None = None
        self._stopped = False
        self._inline_characters = 0
        self._loop = loop
        loop.serve(self._deliver, self._die)

    @classmethod
    def load(cls, model: str | os.PathLike[str], **options: Any) -> AsyncEngine:
        """Load the model and begin to serve. Blocks for seconds.

        Args:
            model: as ``ksana-serve --model``: ``demo``, a folder, a ``.gguf`` file or a hub name.
            options: any field of the configuration by its name: ``dtype="float32"``, ``num_blocks=500``, ...

        Raises:
            UsageError: the model cannot be loaded, or an option is wrong.
        """
        return cls.start(*configure("AsyncEngine.load", model, options))

    @classmethod
    def start(cls, config: KsanaConfig, plugin_manager: KsanaPluginManager) -> AsyncEngine:
        """Like :meth:`load`, with the configuration and the plugins at hand; ``ksana_configure`` has run.

        Raises:
            UsageError: something about the model, the configuration or a plugin is wrong.
        """
        loop = StepLoop(lambda: assemble(config, plugin_manager))
        engine = cls(loop, loop.start(), plugin_manager)
        try:
            plugin_manager.hook.ksana_engine_started(engine=engine)
        except BaseException:
            engine._stopped = True
            loop.stop()
            engine._end("a plugin could not start")
            raise
        return engine

    @property
    def config(self) -> KsanaConfig:
        """The merged configuration."""
        return self.context.config

    @property
    def model_config(self) -> ModelConfig:
        """The loaded model."""
        return self.context.model_config

    @property
    def served_model_name(self) -> str:
        """The name that clients use for the model."""
        return self.config.model.served_model_name or self.model_config.name

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.context.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.context.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self.context.chat_template

    @property
    def is_alive(self) -> bool:
        """False once the engine has stopped, or its step loop has died."""
        return self._dead is None and not self._stopped

    def num_unfinished(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._streams) + len(self._entering)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache, cached but unused ones included."""
        return self._loop.core.scheduler.kv.num_free_blocks

    def snapshot(self) -> EngineSnapshot:
        """What the engine holds now and has counted since its start. May be called on any thread; cheap."""
        return self._loop.core.stats.snapshot()

    async def submit(self, draft: RequestDraft) -> RequestStream:
        """Like :meth:`submit_all`, for a draft that asks for one sequence."""
        [stream] = await self.submit_all(draft)
        return stream

    async def submit_all(self, draft: RequestDraft) -> list[RequestStream]:
        """Run the preprocess hooks, tokenise, validate, and queue.

        Returns:
            One stream for each sequence that the draft asks for, in order. Whoever leaves one aborts that one alone.

        Raises:
            RequestError: the request is refused, by a check, a plugin, or because the queue is full.
            EngineDeadError: the engine has stopped.
        """
        if not self.is_alive:
            raise self._death()
        limits = self.config.scheduler
        if self.num_unfinished() >= limits.max_waiting_queue_len + limits.max_num_seqs:
            # The scheduler would say so too, after a tokenisation for nothing. A flood must not cost even that.
            raise queue_full_error(limits)
        ticket = object()
        self._entering.add(ticket)
        try:
            streams = await self._enter(draft)
        finally:
            self._entering.discard(ticket)
        try:
            for stream in streams:
                await stream.wait_until_admitted()
        except asyncio.CancelledError:
            for stream in streams:
                stream.abort()
            raise
        return streams

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, those that KV connectors keep included; returns how many blocks of the cache.

        Raises:
            EngineDeadError: the engine has stopped, or does not answer.
        """
        done: Future[int] = Future()
        self._loop.post(lambda core: done.set_result(core.scheduler.reset_prefix_cache()))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), _COMMAND_TIMEOUT_S if self.is_alive else 0)
        except asyncio.TimeoutError:
            raise self._death() from None

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is unfinished; False if that took longer than ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.num_unfinished():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_INTERVAL_S)
        return True

    async def abort_all(self) -> None:
        """End all requests; their consumers get a last output that says ``abort``."""
        for request_id in list(self._streams):
            self._abort(request_id)

    async def stop(self, reason: str) -> None:
        """Stop the step loop, after the step in progress. Requests that are left get :class:`EngineDeadError`."""
        if self._stopped:
            return
        self._stopped = True
        await asyncio.to_thread(self._loop.stop)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._die(EngineDeadError(f"the engine has stopped: {reason}"))
        try:
            self.plugin_manager.hook.ksana_engine_stopping(engine=self, reason=reason)
        except Exception:
            logger.exception("a plugin's ksana_engine_stopping failed")

    def _death(self) -> EngineDeadError:
        return self._dead or EngineDeadError("the engine has stopped")

    async def _enter(self, draft: RequestDraft) -> list[RequestStream]:
        """The way of a draft to the engine's thread."""
        await call_in_order(self.plugin_manager, "ksana_preprocess", draft=draft, context=self.context)
        request = await self._admit(draft)
        if draft.sampling.grammar is not None:
            request.set_grammar(await self._grammars.get(draft.sampling.grammar))
        streams = [
            RequestStream(sequence, draft, self.context, self.plugin_manager, self._abort)
            for sequence in request.sequences
        ]
        for stream in streams:
            self._streams[stream.request_id] = stream
        self._loop.post(lambda core: self._add(core, request, streams))
        # Not before: an engine that has ended by now may have missed the streams, one that ends later tells them.
        if not self.is_alive:
            for stream in streams:
                self._streams.pop(stream.request_id, None)
                stream.set_dead(self._death())
        return streams

    async def _admit(self, draft: RequestDraft) -> Request:
        if self._take_inline(_size_of(draft)):
            return self._admission.admit(draft)
        return await asyncio.to_thread(self._admission.admit, draft)

    def _create_grammar_compiler(self) -> GrammarCompiler | None:
        compiler: GrammarCompiler | None = self.plugin_manager.hook.ksana_create_grammar_compiler(
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
        )
        return compiler

    def _take_inline(self, size: int) -> bool:
        """True if this turn of the event loop has time left for a prompt of ``size`` characters."""
        if self._inline_characters + size > _INLINE_CHARACTERS:
            return False
        if self._inline_characters == 0:
            asyncio.get_running_loop().call_soon(self._reset_inline)
        self._inline_characters += size + _INLINE_OVERHEAD
        return True

    def _reset_inline(self) -> None:
        self._inline_characters = 0

    def _abort(self, request_id: str) -> None:
        self._loop.post(lambda core: self._deliver(core.abort(request_id)))

    # -- on the step thread ------------------------------------------------------------------------------------

    def _add(self, core: EngineCore, request: Request, streams: list[RequestStream]) -> None:
        error = None
        try:
            core.add(request)
        except RequestError as refusal:
            error = refusal
        except Exception:
            logger.exception("request %s could not be started", request.request_id)
            error = RequestError(
                "the request could not be started; the server's log says why", status=500, type="server_error"
            )
        for stream in streams:
            if error is not None:
                self._streams.pop(stream.request_id, None)
            self._call(stream, stream.set_admitted, error)

    def _deliver(self, deltas: Iterable[OutputDelta]) -> None:
        """Hand news to the streams, one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, OutputDelta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                news = by_loop.get(stream.loop)
                if news is None:
                    news = by_loop[stream.loop] = []
                news.append((stream, delta))
            if delta.finish_reason is not None:
                self._streams.pop(delta.request_id, None)
        for news in by_loop.values():
            self._call(news[0][0], _push_all, news)

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._grammars.close(error)
        streams, self._streams = self._streams, {}
        for stream in list(streams.values()):  # a submission on another thread may add one yet
            self._call(stream, stream.set_dead, error)

    def _call(self, stream: RequestStream, function: Callable[..., None], *args: object) -> None:
        try:
            stream.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the consumer's event loop is closed: nobody will ever read this
            if stream.request_id in self._streams:
                self._abort(stream.request_id)


def _size_of(draft: RequestDraft) -> int:
    """Characters to tokenise, or more than are ever tokenised inline."""
    size = len(draft.prompt or "") + sum(2 * len(word) + _INLINE_OVERHEAD for word in draft.sampling.bad_words)
    for message in draft.messages or ():
        if size > _INLINE_CHARACTERS:
            break
        size += len(str(message))
    return size


def _push_all(news: list[tuple[RequestStream, OutputDelta]]) -> None:
    for stream, delta in news:
        stream.push(delta)
