"""Compiled grammars: each is made once, on a thread of its own kind, while its requests wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ksana.errors import EngineDeadError, KsanaCode, KsanaError, RequestError
from ksana.text.grammar import Grammar, GrammarCompiler
from ksana.types.config import GrammarConfig
from ksana.types.grammar import GrammarSpec

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
"""Compilations at a time. One that takes too long cannot be stopped, so it is also how many may be stuck."""

_MAX_CACHED_CHARACTERS = 4 * 2**20
"""Of all specifications in the cache: what they compile to is larger, but grows with them."""


@dataclass(slots=True)
class _Compilation:
    spec: GrammarSpec
    num_waiting: int = 0
    outcome: Future[Grammar | KsanaError] = field(default_factory=Future)


class GrammarCache:
    """Compiles what is asked for, off every thread that matters, and keeps what was used last.

    Args:
        create_compiler: called when the first grammar is wanted; returns None if there is none for the loaded model.
        config: time limit and size.
    """

    def __init__(self, create_compiler: Callable[[], GrammarCompiler | None], config: GrammarConfig) -> None:
        self._create_compiler = create_compiler
        self._creation = threading.Lock()
        self._created = False
        self._compiler: GrammarCompiler | None = None
        self._config = config
        self._lock = threading.Lock()
        self._work_there = threading.Condition(self._lock)
        self._cached: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._cached_characters = 0
        self._queued: dict[GrammarSpec, _Compilation] = {}
        self._running: dict[GrammarSpec, _Compilation] = {}
        self._num_threads = 0
        self._death: EngineDeadError | None = None

    async def get(self, spec: GrammarSpec) -> Grammar:
        """The compiled grammar. Waits for it, on any event loop, no longer than the time limit.

        Raises:
            RequestError: the grammar is wrong, too complex, or takes too long.
            EngineDeadError: the cache was closed.
        """
        with self._lock:
            grammar = self._cached.get(spec)
            if grammar is not None:
                self._cached.move_to_end(spec)
                return grammar
            compilation = self._running.get(spec) or self._queued.get(spec) or self._enqueue(spec)
            compilation.num_waiting += 1
        try:
            # Unlike wait_for, this cancels nothing: others may wait for the same one.
            waiting = asyncio.wrap_future(compilation.outcome)
            await asyncio.wait([waiting], timeout=self._config.grammar_timeout_s)
        finally:
            self._leave(compilation)
        outcome = waiting.result() if waiting.done() else self._too_slow()
        if isinstance(outcome, KsanaError):
            raise outcome
        return outcome

    def close(self, error: EngineDeadError) -> None:
        """Whoever waits for a grammar, or will, gets ``error``."""
        with self._lock:
            self._death = error
            for compilations in (self._queued, self._running):
                while compilations:
                    compilations.popitem()[1].outcome.set_result(error)

    def _enqueue(self, spec: GrammarSpec) -> _Compilation:
        if self._death is not None:
            raise self._death
        compilation = self._queued[spec] = _Compilation(spec)
        self._work_there.notify()
        if self._num_threads < _NUM_THREADS:
            self._num_threads += 1
            # A daemon: one that is stuck must not keep the process from ending.
            threading.Thread(target=self._work, name=f"ksana-grammar-{self._num_threads}", daemon=True).start()
        return compilation

    def _leave(self, compilation: _Compilation) -> None:
        """Nothing is compiled for those who have left before it began, so they cannot pile up either."""
        with self._lock:
            compilation.num_waiting -= 1
            if compilation.num_waiting == 0 and self._queued.get(compilation.spec) is compilation:
                del self._queued[compilation.spec]

    def _work(self) -> None:
        while True:
            with self._lock:
                self._work_there.wait_for(lambda: self._queued)
                spec = next(iter(self._queued))
                compilation = self._running[spec] = self._queued.pop(spec)
            outcome = self._compile(spec)
            with self._lock:
                if self._running.pop(spec, None) is None:  # the cache was closed meanwhile
                    continue
                if not isinstance(outcome, RequestError):
                    self._keep(spec, outcome)
                compilation.outcome.set_result(outcome)

    def _compile(self, spec: GrammarSpec) -> Grammar | RequestError:
        try:
            compiler = self._get_compiler()
            if compiler is None:
                return RequestError(
                    "structured output is not available: no plugin constrains this model's tokenizer", param="grammar"
                )
            return compiler.compile(spec)
        except RequestError as refusal:
            return refusal
        except BaseException:  # what escapes would end the thread, and the panic of a library in Rust is no Exception
            logger.exception("a grammar could not be compiled")
            return RequestError("the grammar could not be compiled", code="invalid_grammar", param="grammar")

    def _get_compiler(self) -> GrammarCompiler | None:
        with self._creation:
            if not self._created:
                self._compiler = self._create_compiler()
                self._created = True
            return self._compiler

    def _keep(self, spec: GrammarSpec, grammar: Grammar) -> None:
        self._cached[spec] = grammar
        self._cached_characters += len(spec.value)
        while len(self._cached) > self._config.max_cached_grammars or self._cached_characters > _MAX_CACHED_CHARACTERS:
            dropped, _ = self._cached.popitem(last=False)
            self._cached_characters -= len(dropped.value)

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"the grammar was not compiled within {self._config.grammar_timeout_s:g} s; a simpler one may be",
            code="grammar_timeout",
            param="grammar",
            ksana_code=KsanaCode.TIMEOUT,
        )
