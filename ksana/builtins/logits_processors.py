"""Builtin plugin: penalties, bans and biases of the decoding options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.types.model import ModelConfig
    from ksana.worker.logits_processor import LogitsProcessor


@hookimpl
def ksana_create_logits_processors(model_config: ModelConfig) -> Sequence[LogitsProcessor]:
    """Create them in the order in which they apply: penalties change the model's own logits."""
    from ksana.worker.processors.logit_bias import LogitBias
    from ksana.worker.processors.penalties import Penalties
    from ksana.worker.processors.token_bans import TokenBans

    return [Penalties(), TokenBans(model_config.vocab_size), LogitBias()]
