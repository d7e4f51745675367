"""Between the engine's hooks and a model folder's ``KsanaPlugin``: threads, views, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ksana.errors import KsanaCode, RequestError
from ksana.markers import hookimpl
from ksana.plugin.python_io import KsanaPythonInput, KsanaPythonOutput

if TYPE_CHECKING:
    from ksana.engine.context import ProcessingContext
    from ksana.types.output import RequestOutput
    from ksana.types.request import RequestDraft

logger = logging.getLogger(__name__)

T = TypeVar("T")

METHOD_KEYWORDS = {
    "init_plugin": (
        "preprocess",
        "postprocess",
        "model_path",
        "config_file",
        "enable_trt",
        "model_type",
        "vit_model_type",
    ),
    "preprocess": ("ksana_python_input", "messages", "additional_params", "prompt"),
    "postprocess": ("ksana_python_input", "ksana_python_output"),
}
"""Keyword arguments of the three methods."""


class PluginThreads:
    """The threads that run a plugin's code, so that it never holds up the event loop."""

    def __init__(self, size: int) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="ksana-plugin")

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``function`` on a thread and return its future."""
        return self._executor.submit(function, *args)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function`` on a thread and await it. Cancelled before it starts, it never runs."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """Take no more work and drop what has not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class ModelDirAdapter:
    """Plugin object that calls ``preprocess`` and ``postprocess`` of a ``KsanaPlugin`` with the views they expect."""

    def __init__(self, plugin: Any, file: Path, threads: PluginThreads) -> None:
        self._preprocess: Callable[..., object] | None = getattr(plugin, "preprocess", None)
        self._postprocess: Callable[..., object] | None = getattr(plugin, "postprocess", None)
        self._file = file
        self._threads = threads

    @hookimpl
    async def ksana_preprocess(self, draft: RequestDraft, context: ProcessingContext) -> None:
        """Let the plugin edit a view of the draft, then take its changes over."""
        if self._preprocess is not None:
            await self._threads.run(self._guarded, self._run_preprocess, draft, context)

    @hookimpl
    async def ksana_postprocess(self, output: RequestOutput, draft: RequestDraft, context: ProcessingContext) -> None:
        """Let the plugin edit a view of the last output, then take its changes over."""
        if self._postprocess is not None:
            await self._threads.run(self._guarded, self._run_postprocess, output, draft, context)

    @hookimpl
    def ksana_engine_stopping(self) -> None:
        """Give the threads back."""
        self._threads.close()

    def _run_preprocess(self, draft: RequestDraft, context: ProcessingContext) -> None:
        assert self._preprocess is not None
        view = KsanaPythonInput(draft, context)
        self._preprocess(
            ksana_python_input=view,
            messages=draft.messages,
            additional_params=draft.additional_params,
            prompt=draft.prompt,
        )
        view.apply_changes()

    def _run_postprocess(self, output: RequestOutput, draft: RequestDraft, context: ProcessingContext) -> None:
        assert self._postprocess is not None
        view = KsanaPythonOutput(output)
        self._postprocess(
            ksana_python_input=KsanaPythonInput(draft, context, output.prompt_token_ids), ksana_python_output=view
        )
        json.dumps(view.extra, allow_nan=False)  # fail here, where the plugin is known, not while answering
        view.apply_changes()

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Run on the plugin's thread; hide from the client what only the operator should read."""
        try:
            function(*args)
        except RequestError:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not be able to end the event loop
            logger.exception("plugin %s failed", self._file)
            raise RequestError(
                "the plugin of the model's folder failed on this request",
                status=500,
                type="server_error",
                code="plugin_error",
                ksana_code=KsanaCode.RUNTIME_FAILED,
            ) from error
