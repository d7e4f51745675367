"""Offline batches: the same engine as the server's, called from ordinary code."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, TypeVar, Union

import numpy as np

from ksana.engine.async_engine import AsyncEngine
from ksana.engine.best_of import select_best
from ksana.engine.embedding import Embedder
from ksana.engine.keywords import configure
from ksana.errors import EngineDeadError
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

T = TypeVar("T")

Prompt = Union[str, "list[int]"]

_UNLIMITED_QUEUE: dict[tuple[str, ...], float] = {
    ("scheduler", "max_waiting_queue_len"): sys.maxsize,
    ("scheduler", "waiting_timeout_s"): threading.TIMEOUT_MAX,
    ("grammar", "grammar_timeout_s"): threading.TIMEOUT_MAX,
}
"""An offline batch has no clients to protect: it may be as long as memory allows."""


class LLM:
    """A loaded model for batches of prompts.

    Example::

        with LLM("demo") as llm:
            for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
                print(output.text)

    Args:
        model: as ``ksana-serve --model``: ``demo``, a folder, a ``.gguf`` file or a hub name.
        options: any field of the configuration by its name: ``dtype="float32"``, ``num_blocks=500``, ...

    Raises:
        UsageError: the model cannot be loaded, or an option is wrong.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.engine = AsyncEngine.start(*configure("LLM", model, options, _UNLIMITED_QUEUE))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ksana-offline", daemon=True)
        self._thread.start()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch.

        Args:
            prompts: texts or lists of token ids; a single one is a batch of one.
            sampling: for all, or one for each; the default samples at temperature 1 up to the model's length.
            progress: show a progress bar; default: if stderr is a terminal.

        Returns:
            One output a prompt, in order; ``n`` for each prompt, one after the other, if the sampling asks for more.

        Raises:
            RequestError: a prompt or a parameter is refused; nothing of the batch goes on.
        """
        batch = _as_batch(prompts)
        drafts = [
            RequestDraft(prompt=p, sampling=s) if isinstance(p, str) else RequestDraft(prompt_token_ids=p, sampling=s)
            for p, s in zip(batch, _spread(sampling, len(batch)), strict=True)
        ]
        return self._run(self._complete(drafts, progress))

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for conversations (lists of ``{"role": ..., "content": ...}``)."""
        first = conversations[0] if conversations else None
        batch: list[Any] = [conversations] if isinstance(first, dict) else list(conversations)
        drafts = [
            RequestDraft(messages=list(messages), sampling=s)
            for messages, s in zip(batch, _spread(sampling, len(batch)), strict=True)
        ]
        return self._run(self._complete(drafts, progress))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool | None = None
    ) -> np.ndarray:
        """Vectors of unit length, whose inner products say how alike texts are to the model.

        Args:
            prompts, progress: as in :meth:`generate`.
            dimensions: elements of a vector; default: the model's hidden size.

        Returns:
            float32 [number of prompts, dimensions].

        Raises:
            RequestError: a prompt is refused, or the model cannot do it.
        """
        embedder = Embedder(self.engine.model_config, dimensions)
        outputs = self._run(self._complete([embedder.draft(prompt) for prompt in _as_batch(prompts)], progress))
        vectors = np.empty((len(outputs), embedder.dimensions), dtype=np.float32)
        for index, output in enumerate(outputs):
            vectors[index] = embedder.vector(output)
        return vectors

    def close(self) -> None:
        """Stop the engine. The memory of the model is free once this object is."""
        if self._closed:
            return
        self._closed = True
        self._run(self.engine.stop("closed"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _complete(self, drafts: list[RequestDraft], progress: bool | None) -> list[RequestOutput]:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        show = console.is_terminal if progress is None else progress
        with Progress(console=console, disable=not show) as bar:
            task = bar.add_task("Generating", total=len(drafts))

            async def complete(draft: RequestDraft) -> list[RequestOutput]:
                outputs = await self._finish(draft)
                bar.advance(task)
                return outputs

            tasks = [asyncio.ensure_future(complete(draft)) for draft in drafts]
            try:
                return [output for outputs in await asyncio.gather(*tasks) for output in outputs]
            finally:
                for pending in tasks:
                    pending.cancel()

    async def _finish(self, draft: RequestDraft) -> list[RequestOutput]:
        """The last outputs of a draft's sequences."""
        draft.final_only = True
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(stream) for stream in await self.engine.submit_all(draft)]
            outputs = [await stream.result() for stream in streams]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return select_best(outputs, draft.sampling)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise EngineDeadError("this LLM is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} sampling parameters for {count} prompts")
    return list(sampling)
