"""Text in and out: tokenizer, incremental detokenizer, stop strings, chat template. No torch, no transformers."""

from ksana.text.chat_template import ChatTemplate
from ksana.text.detokenizer import Detokenizers, IncrementalDetokenizer
from ksana.text.stop_matcher import StopMatcher, StopResult
from ksana.text.tokenizer import FastTokenizer, Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizers",
    "FastTokenizer",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopResult",
    "Tokenizer",
]
