"""Builtin plugin: drafters for speculative decoding that need no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.scheduling.drafter import Drafter
    from ksana.types.config import SpeculationConfig


@hookimpl(trylast=True)
def ksana_create_drafter(config: SpeculationConfig) -> Drafter | None:
    """Create the drafters ``ngram`` and ``trie``."""
    if config.method == "ngram":
        from ksana.drafters.ngram import NgramDrafter

        if config.min_ngram > config.max_ngram:
            raise UsageError(f"--min-ngram {config.min_ngram} is more than --max-ngram {config.max_ngram}")
        return NgramDrafter(config.min_ngram, config.max_ngram)
    if config.method == "trie":
        from ksana.drafters.trie import TrieDrafter

        return TrieDrafter(config.trie_nodes)
    return None
