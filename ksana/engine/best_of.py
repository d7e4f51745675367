"""The best of several sequences of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ksana.types.output import RequestOutput
from ksana.types.sampling import SamplingParams


def select_best(outputs: Sequence[RequestOutput], sampling: SamplingParams) -> list[RequestOutput]:
    """The ``sampling.n`` sequences whose tokens are likeliest on average, best first.

    Args:
        outputs: last outputs of all sequences of a prompt, in order.
        sampling: of their draft.

    Returns:
        All of them, in order, if ``sampling.best_of`` does not ask for a choice.
    """
    if sampling.num_sequences == sampling.n:
        return list(outputs)
    best = sorted(outputs, key=_mean_logprob, reverse=True)[: sampling.n]
    if sampling.logprobs is None:
        for output in best:
            output.logprobs = []  # they were computed for this choice
    return best


def _mean_logprob(output: RequestOutput) -> float:
    if not output.logprobs:
        return -math.inf
    return sum(entry.logprob for entry in output.logprobs) / len(output.logprobs)
