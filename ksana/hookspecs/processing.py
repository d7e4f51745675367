"""Hooks on the way of one request: before admission, on its output, after its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ksana.engine.context import ProcessingContext
    from ksana.types.output import RequestOutput
    from ksana.types.request import RequestDraft


@hookspec
def ksana_preprocess(draft: RequestDraft, context: ProcessingContext) -> Awaitable[None] | None:
    """Edit the draft in place: prompt, token ids, messages, embeddings, sampling.

    When: once per request, before tokenisation and validation, on the event loop. May be ``async def``; slow work
    belongs in a thread (``await asyncio.to_thread(...)``). Not firstresult: every plugin sees the draft, the last
    registered first. Raise :class:`ksana.errors.RequestError` to refuse the request.

    Example::

        @hookimpl
        def ksana_preprocess(draft, context):
            if draft.prompt is not None:
                draft.prompt = draft.prompt.strip()
    """


@hookspec
def ksana_postprocess(output: RequestOutput, draft: RequestDraft, context: ProcessingContext) -> Awaitable[None] | None:
    """Look at, or change in place, the last output of a request before its consumer gets it.

    When: once per request that ended with ``stop`` or ``length``, after its last token. May be ``async def``. Not
    firstresult. ``output.text`` and ``output.token_ids`` hold the whole answer. Text that a stream has already sent
    cannot be unsaid; ``output.extra`` is where results of your own belong: the native API sends it along.

    Example::

        @hookimpl
        def ksana_postprocess(output, draft, context):
            output.extra["words"] = len(output.text.split())
    """
