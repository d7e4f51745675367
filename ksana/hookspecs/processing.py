"""Hooks on the way of one request: before admission, on its output, after its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ksana.engine.context import ProcessingContext
    from ksana.text.grammar import GrammarCompiler
    from ksana.text.parsing import ReasoningParserInfo, ToolParserInfo
    from ksana.text.tokenizer import Tokenizer
    from ksana.types.model import ModelConfig
    from ksana.types.output import RequestOutput
    from ksana.types.request import RequestDraft
    from ksana.worker.logits_processor import LogitsProcessor


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


@hookspec
def ksana_create_logits_processors(model_config: ModelConfig, tokenizer: Tokenizer) -> Sequence[LogitsProcessor] | None:
    """Create what changes logits before tokens are drawn, see :class:`ksana.worker.logits_processor.LogitsProcessor`.

    When: once an engine at start, on the thread that computes. Not firstresult: the processors of all plugins apply,
    those of the plugin that was registered first before the others, so the builtin penalties, bans and biases come
    before yours. Raise :class:`ksana.errors.UsageError` if yours cannot work.

    A processor serves all requests: ``add`` tells it of each one that starts. ``apply`` and ``accept`` belong to the
    hot loop, so what can be done for all rows of a step at once should be.

    Example::

        @hookimpl
        def ksana_create_logits_processors(model_config, tokenizer):
            return [my_package.NoDigits(tokenizer, model_config.vocab_size)]
    """


@hookspec(firstresult=True)
def ksana_create_grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    """Create what compiles grammars for structured output, or return None if you cannot serve this tokenizer.

    When: once an engine, when the first request needs it, on a thread that compiles. Firstresult. If nobody has one,
    such requests are refused and all else works. ``vocab_size`` is the number of logits, and may exceed the tokens that
    the tokenizer knows.

    Example::

        @hookimpl
        def ksana_create_grammar_compiler(tokenizer, vocab_size, eos_token_ids):
            return my_package.Compiler(tokenizer, vocab_size, eos_token_ids)
    """


@hookspec
def ksana_tool_parsers(register: Callable[[ToolParserInfo], None]) -> None:
    """Register formats in which models write tool calls, by calling ``register`` once for each.

    When: at start, once the configuration is known. Not firstresult. Of two parsers of one name, the one of the plugin
    that was registered last is taken. ``create`` is called once a request, on the event loop.

    Example::

        @hookimpl
        def ksana_tool_parsers(register):
            register(ToolParserInfo("my_format", create=lambda context: MyToolParser(context.tools)))
    """


@hookspec
def ksana_reasoning_parsers(register: Callable[[ReasoningParserInfo], None]) -> None:
    """Register ways in which models mark their reasoning, by calling ``register`` once for each.

    When: at start, once the configuration is known. Not firstresult. Names are handled as those of tool parsers are.
    ``create`` is called once a request, on the event loop, and may return None for a request that does not reason.

    Example::

        @hookimpl
        def ksana_reasoning_parsers(register):
            register(ReasoningParserInfo("my_tags", create=lambda context: MyReasoningParser(), end_token_text="</r>"))
    """
