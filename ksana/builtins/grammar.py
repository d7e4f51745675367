"""Builtin plugin: constrained decoding by llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.text.grammar import GrammarCompiler
    from ksana.text.tokenizer import Tokenizer


@hookimpl(trylast=True)
def ksana_create_grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    """Serve every model whose tokens are known as bytes, and which has a way to end a text."""
    if not (tokenizer.is_byte_exact and eos_token_ids):
        return None
    from ksana.text.llguidance_grammar import GuidanceCompiler

    return GuidanceCompiler(tokenizer, vocab_size, eos_token_ids)
