"""Reasoning that ends with ``</think>``, before the answer.

Most templates write ``<think>`` at the end of the prompt, so the answer begins in the middle of the reasoning; others
leave it to the model. An answer that ends without the closing tag has been reasoning all along.
"""

from __future__ import annotations

from ksana.text.parsing import OutputParser, ParserContext, ReasoningParserInfo
from ksana_openai_api.parsing import Emitter, Scan, ScanParser, Source, Tags

_BEGIN = "<think>"
_END = "</think>"
_END_TAG = Tags(_END)
_NO_TAG = Tags()


def _scan_open(source: Source, out: Emitter) -> Scan[None]:
    """The answer begins with reasoning, whether it says so or not."""
    yield from source.space()
    yield from source.accept(_BEGIN)
    yield from _scan_reasoning(source, out)


def _scan_unopened(source: Source, out: Emitter) -> Scan[None]:
    """The answer begins with reasoning only if it says so."""
    source.start_record("")
    yield from source.space()
    if (yield from source.accept(_BEGIN)):
        source.stop_record()
        yield from _scan_reasoning(source, out)
    else:
        out.text(source.stop_record())
        yield from source.copy_until(_NO_TAG, out.text)


def _scan_reasoning(source: Source, out: Emitter) -> Scan[None]:
    out.markup()
    yield from source.copy_until(_END_TAG, out.reasoning)
    out.markup()
    yield from source.copy_until(_NO_TAG, out.text)


def _create_deepseek_r1(context: ParserContext) -> OutputParser:
    return ScanParser(_scan_open)


def _create_deepseek_v3(context: ParserContext) -> OutputParser | None:
    return ScanParser(_scan_open) if context.chat_template_kwargs.get("thinking") else None


def _create_qwen3(context: ParserContext) -> OutputParser | None:
    if not context.chat_template_kwargs.get("enable_thinking", True):
        return None
    opened = context.prompt is None or context.prompt.rstrip().endswith(_BEGIN)
    return ScanParser(_scan_open if opened else _scan_unopened)


DEEPSEEK_R1 = ReasoningParserInfo("deepseek_r1", _create_deepseek_r1, _END)
DEEPSEEK_V3 = ReasoningParserInfo("deepseek_v3", _create_deepseek_v3, _END)
QWEN3 = ReasoningParserInfo("qwen3", _create_qwen3, _END)
