"""Text in and out: tokenizer, incremental detokenizer, stop strings, chat template. No torch, no transformers."""

from ksana.text.chat_template import ChatTemplate
from ksana.text.detokenizer import IncrementalDetokenizer, create_detokenizer
from ksana.text.stop_matcher import StopMatcher, StopResult
from ksana.text.tokenizer import FastTokenizer, Tokenizer

__all__ = [
    "ChatTemplate",
    "FastTokenizer",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopResult",
    "Tokenizer",
    "create_detokenizer",
]
